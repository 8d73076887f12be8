"""Credit assignment: the advantage of every token of a step."""
