"""Policies behind HTTP: the OpenAI protocol over our engine, alone or with their searches."""
