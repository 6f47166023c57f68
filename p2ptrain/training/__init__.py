"""What `p2ptrain join` runs: models, data, the trainer, checkpoints, generation."""
