"""The web as a knowledge base: it searches, reads and summarises pages concurrently, with caches and snapshots."""
