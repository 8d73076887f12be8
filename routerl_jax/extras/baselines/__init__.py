"""The methods that the papers compare themselves with: short agents, one file each, by name."""
