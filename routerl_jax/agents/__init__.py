"""Agents: straight-line async code that talks to a policy and to tools; the driver batches them all."""
