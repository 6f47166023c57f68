"""The synchronous part of `Peer.step()`, the only code that changes the model, and its interface to the node."""
