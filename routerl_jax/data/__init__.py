"""Datasets and their readers, and Atlas, the embedded world of real facts."""
