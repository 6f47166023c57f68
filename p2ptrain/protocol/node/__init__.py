"""One peer of a run: all parts of the protocol in one nursery, and what builds it anew when it fails."""
