"""Simulates whole swarms in one process and virtual time, with the node, protocol and training loop of real peers."""
