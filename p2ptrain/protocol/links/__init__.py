"""One link per partner: flow control, heartbeats, priorities, requests."""
