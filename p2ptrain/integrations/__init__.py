"""p2ptrain inside other people's training loops; each needs an extra of the same name."""
