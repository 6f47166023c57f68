"""The agreed state: founding it, downloading it, and catching up with the swarm."""
