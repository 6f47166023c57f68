"""Discovery and reachability of peers, and their status."""
