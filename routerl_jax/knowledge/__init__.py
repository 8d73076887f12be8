"""Knowledge bases: built from a corpus or tables, stored on disk, searched by many queries at once."""
