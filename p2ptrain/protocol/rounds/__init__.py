"""The round protocol: one outer all-reduce, decided by a quorum, with any member free to fail at any message.

Three parts that meet at small seams:

- **What is decided** is pure. `consensus` is single-decree Paxos for each (lineage, round): `step(state, event, now)`
  returns the new state and a list of effects (`events`); `quorum` says who votes. `policy` says who is in the mean,
  what each counts and who averages; `record` what a round decides; `leader_election` who leads; `timeouts` how long to
  wait for whom; `lineage` when the voters are gone for good.
- **How gradients become a mean** is a strategy: `averaging` has the interface and one file for each. The consensus
  never sees which one is used.
- **The driver** joins both to links, clock and the training thread. `driver` takes messages and time to the consensus
  (through `runner`) and carries out its effects, in tasks of its own nursery (`attempts`): `member` takes part in one
  attempt (`snapshot` and `contribution` are what it brings, `transfer` and `collection` how chunks go out and come in),
  `leader` leads the averaging of one, `outcome` brings a decided round home (`fetching` its bytes, `commit` its outer
  step and landing). `calling` says when we are due and when we lead; `liveness` is who is there.

The way of one round: due → Call → snapshot, Join → `policy` plans, Roster → chunks to reducers → Reduce → Reduced →
`record` → Propose → fetch, Ready → Commit → outer step → landing in `peer.step()`.

What an error costs: in a member's or leader's task, that attempt; in an outcome's, another try, and in the end the
whole state anew; bytes that break a rule, their sender's link.
"""
