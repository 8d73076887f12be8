"""R1-Router (arXiv 2505.22095): which knowledge base answers each sub-question?"""
