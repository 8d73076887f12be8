"""What a trained router is compared with."""
