"""A tree of summaries over passages: what is told in many places is found at one (RAPTOR)."""
