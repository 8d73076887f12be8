"""Other authors' graph packages as kinds of knowledge bases: LightRAG and GraphRAG."""
