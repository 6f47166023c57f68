"""The agreed state: founding a run, downloading the state, and catching up with the swarm."""
