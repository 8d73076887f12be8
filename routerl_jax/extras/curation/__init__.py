"""Training data that models make: questions by difficulty, golden trajectories."""
