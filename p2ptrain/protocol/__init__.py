"""The protocol between peers: frames, links, gossip, rounds, late joiners. Trio only; knows no network library."""
