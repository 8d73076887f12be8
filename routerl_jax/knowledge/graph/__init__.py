"""The graph knowledge base of HippoRAG 2 (arXiv 2502.14802): triples, their graph, and personalised PageRank over it."""
