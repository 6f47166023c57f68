"""The round protocol: one outer all-reduce, decided by a quorum; any member may fail at any message.

- `deciding` decides: pure functions of state, message and time. It knows no link, task or clock.
- `moving` carries the bytes: chunks of outer gradients to the reducers, means back.
- `landing` connects to the weights: the snapshot that a round begins with, the outer step that it ends with.
- `driver` has the head, and acts when it is time. `attempts` passes events to the consensus and carries out its
  effects as tasks. `context` has the objects that all parts of a peer's rounds use; `liveness` lists the live peers.

The steps of a round: due → Call → snapshot, Join → `policy` plans, Roster → chunks to reducers, means back → Reduced
(after a Reduce, if others contribute than were expected) → `record` → Propose → fetch, Ready → Commit → outer step →
landing in `peer.step()`.

Errors: in a member's or leader's task, one costs that attempt; when applying a decided round, one costs a retry, or a
download of the whole state; bytes that break a rule cost their sender's link.
"""
