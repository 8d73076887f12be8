"""Benchmarks by name, one file each: questions, knowledge bases, and where to get them."""
