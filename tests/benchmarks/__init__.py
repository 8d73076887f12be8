"""Benchmarks count and measure what they say."""
