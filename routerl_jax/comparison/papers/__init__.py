"""Tables of papers by name, one file a paper: their numbers, and ours in the same layout."""
