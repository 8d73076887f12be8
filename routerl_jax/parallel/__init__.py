"""Device meshes, sharding rules and multi-host helpers."""
