"""R1-Router (arXiv 2505.22095): the policy learns which knowledge base to ask for each sub-question."""
