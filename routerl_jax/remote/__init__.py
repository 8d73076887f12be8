"""What calling other machines takes: requests, keys, caches, limits on rates."""
