"""Training runs: from a configuration to a workdir with checkpoints, metrics, figures and results."""
