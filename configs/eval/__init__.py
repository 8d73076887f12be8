"""Comparisons of agents on benchmarks (launch.evaluate)."""
