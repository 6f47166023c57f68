"""`Peer`: joins a user's training loop to a node on the network thread; alone, or as a torch process group."""
