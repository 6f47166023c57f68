"""What is decided in a round: pure functions. Begin with `consensus`.

`consensus` decides the round after a head: `step(state, event, now)` returns the new state and a list of effects
(`events`). `voters` says who votes, `proof` what peers sign, `timeouts` how long to wait. The leader decides by
`policy` who contributes and who averages, by `guard` which outer gradients are too large, and makes the `record`, which
the others check. `averaging` makes one mean of encoded chunks (`grid`). `history` decides whose lineage continues when
two meet, `lineage` when the voters are gone for good.
"""
