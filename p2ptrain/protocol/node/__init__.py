"""One peer of a run: all parts of the protocol in one nursery, and its restart after failures."""
