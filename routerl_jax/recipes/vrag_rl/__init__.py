"""VRAG-RL (arXiv 2505.22019): the policy searches page images, looks closer at a region, and answers (coarse to fine)."""
