"""VRAG-RL (arXiv 2505.22019): page images are searched, looked at as a whole, then closer."""
