"""A tree of summaries over passages (RAPTOR): a summary collects what many passages say."""
