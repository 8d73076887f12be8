"""MMSearch-R1 (arXiv 2506.20670): the policy learns when to search, and whether by the picture or by text."""
