"""The methods that the papers compare themselves with: short agents, by name."""
