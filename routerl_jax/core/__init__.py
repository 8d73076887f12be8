"""The types that all packages share, the tokenizer, configuration, registries and files."""
