"""The round protocol: one outer all-reduce, decided by a quorum; any member may fail at any message.

It has three parts:

- **Decisions** are pure. `consensus` is single-decree Paxos for each (lineage, round): `step(state, event, now)`
  returns the new state and a list of effects (`events`). `policy` decides who
  contributes, with which weight, and who averages; `guard` which outer gradients and means are too large; `record`
  builds the record, and refuses impossible claims; `schedule` decides when we are due and who leads; `timeouts`
  how long to wait; `lineage` when the voters are gone for good. `proof` says who votes and what peers sign, and
  `history` decides whose lineage continues when two meet.
- **Averaging** is a strategy (`averaging`). The consensus does not depend on it.
- **The driver** connects both to links, clock and training thread. `driver` has the head, and acts when it is time.
  `attempts` passes events to the consensus and carries out its effects: `member` takes part in one attempt and sends
  our chunks (`snapshot` and `contribution` hold its outer gradient, `reducer` averages those of one part, which
  `collection` holds and measures), `leader` leads the averaging of one. `commit` applies a
  decided round: it fetches the parts, and `outer_step` changes the anchor. `audit` averages a part again after it.
  `liveness` lists the live peers.

The steps of a round: due → Call → snapshot, Join → `policy` plans, Roster → chunks to reducers, means back → Reduced
(after a Reduce, if others contribute than were expected) → `record` → Propose → fetch, Ready → Commit → outer step →
landing in `peer.step()`.

Errors: in a member's or leader's task, one costs that attempt; when applying a decided round, one costs a retry, or a
download of the whole state; bytes that break a rule cost their sender's link.
"""
