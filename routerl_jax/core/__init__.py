"""The few types that everything passes, tokenization, configuration and registries."""
