"""The checks of `p2ptrain doctor`: whether a peer works on this machine, and whether other peers can reach it."""
