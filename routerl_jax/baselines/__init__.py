"""What the papers compare themselves with: agents of a screenful each, by name."""
