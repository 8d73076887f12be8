"""What every token of a step answers for."""
