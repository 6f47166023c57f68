"""Outer steps between random pairs of peers (NoLoCo), without a quorum.

`matching` decides which peers pair, `swap` sends weights both ways, and `pairwise` has the tasks around them. `joining`
gets a joiner its first anchor.

There is no leader, quorum or record here. Any failure costs a peer only its partner, and it takes that step alone.
Rounds agree on one thing only: the plain average at the end of the run.
"""
