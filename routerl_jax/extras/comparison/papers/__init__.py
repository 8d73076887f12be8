"""Tables of papers by name, one file per paper: their numbers, and ours in the same layout."""
