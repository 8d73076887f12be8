"""Benchmarks by name, one file each: questions, knowledge bases, and where both are had."""
