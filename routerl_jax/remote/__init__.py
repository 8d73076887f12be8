"""Calls to other machines: requests, keys, caches, rate limits."""
