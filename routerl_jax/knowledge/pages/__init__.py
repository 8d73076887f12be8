"""Knowledge bases of page images: documents to pages, late interaction (MaxSim), and text read from the pages (OCR)."""
