"""Evaluation of agents: metrics with intervals, tables, figures, and readable trajectories."""
