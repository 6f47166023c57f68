"""Takes snapshots of the weights, and applies decided rounds to them. Begin with `commit`.

`snapshot` gets the weights from the training thread when a round begins, and makes encoded chunks of them in the same
memory. `commit` applies a decided round: it fetches the means, takes the outer step (`outer_step`) and hands a landing
to the training thread.
"""
