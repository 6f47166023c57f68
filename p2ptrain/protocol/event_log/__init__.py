"""A peer's event log, and the observer that reads the logs of all peers."""
