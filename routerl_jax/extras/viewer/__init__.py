"""The web page over runs: curves, health, and an explorer of their episodes (`launch.view`)."""
