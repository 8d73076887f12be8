"""Many agents on many benchmarks: the same questions, k, budget and metrics for all, and one report."""
