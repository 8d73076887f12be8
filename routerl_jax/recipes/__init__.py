"""One file per recipe: its agent, its reward, its stages."""
