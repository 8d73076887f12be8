"""Answer normalisers, metrics, format checks and the reward terms that recipes combine."""
