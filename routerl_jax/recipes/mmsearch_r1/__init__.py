"""MMSearch-R1 (arXiv 2506.20670): when to search, and whether by the picture or in words."""
