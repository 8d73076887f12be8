"""Model architectures, and their import from and export to Hugging Face."""
