"""`Peer`: connects a user's training loop to a node on the network thread; a torch process group is one peer."""
