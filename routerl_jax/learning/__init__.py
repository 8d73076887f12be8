"""From scored episodes to new weights: advantages, losses, batches, the update, checkpoints."""
