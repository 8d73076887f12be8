"""VRAG-RL (arXiv 2505.22019): pages seen coarse to fine: search page images, look closer at a region, answer."""
