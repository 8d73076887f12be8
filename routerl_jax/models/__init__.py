"""Model architectures, and their way from and to Hugging Face."""
