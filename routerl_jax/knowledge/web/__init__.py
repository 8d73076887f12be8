"""The web as a knowledge base: search, read, summarise, all at once, kept in caches and frozen in snapshots."""
