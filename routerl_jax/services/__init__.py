"""Language models that are asked for one answer: extraction, summaries, judges, data construction."""
