"""Batched multi-turn generation on persistent KV-cache rows."""
