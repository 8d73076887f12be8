"""Model families in Hugging Face's terms; the table of them is `models.family.FAMILIES`."""
