"""The synchronous half of `Peer.step()`: the only code that touches the model, and what it and the node hand over."""
