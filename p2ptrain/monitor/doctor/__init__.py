"""What `p2ptrain doctor` looks at: whether a peer would work on this machine, and whether others can reach it."""
