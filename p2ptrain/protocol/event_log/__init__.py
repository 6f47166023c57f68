"""What a peer tells observers, and observing."""
