"""Measuring agents: metrics with intervals, tables, figures, and trajectories to read."""
