"""One link per peer: flow control, heartbeats, priorities, requests."""
