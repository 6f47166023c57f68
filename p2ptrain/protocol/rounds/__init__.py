"""The round protocol: one outer all-reduce, decided by a quorum; any member may fail at any message.

- `deciding` decides: pure functions, and the consensus (single-decree Paxos for each lineage and round).
- `moving` carries the bytes: the chunks of a snapshot to the reducers, means back.
- `landing` applies a decided round: the outer step, and its landing in the weights.
- `driver` has the head, and acts when it is time, by the `schedule`. `attempts` passes events to the consensus and
  carries out its effects as tasks. `context` has the objects that all parts of a peer's rounds use; `liveness` says
  which peers are live.

`deciding` imports nothing of the others, `moving` nothing of `landing`, and only `driver` imports `attempts`. The
`context` has the two stores of `moving`, and the tasks of `moving` get the context.

The consensus has its own words: its `Proposer` is led by an `AveragingLeader`, and its `Member` is a `Participation`.

One round, and where to read it. A leader is a member too.

| step | of whom | where |
|---|---|---|
| due (half of the voters): an interval has passed | each peer | `exchange/position.py`, `schedule.Schedule.due` |
| Call | the leader | `leading.leader_of`, `consensus` |
| snapshot, Join | each member | `member.Participation`, `snapshot.SnapshotTaker` |
| Roster: who sends which chunks to whom | the leader | `leader.AveragingLeader`, `policy`, `averaging` |
| chunks to the reducers | each member | `member.Sender`, `snapshot.OwnContribution` |
| means back; Reduced (after a Reduce if others contribute than expected) | reducers | `reducer`, `pushed_means` |
| Propose the record | the leader | `record.proposal_of`, `consensus` |
| fetch what is missing, check it, Ready | each member | `fetch.RecordFetcher`, `part_store`, `record`, `guard` |
| Commit | the leader | `consensus` |
| outer step, landing in `peer.step()` | each peer | `commit.Committer`, `outer_step` |
| Landed: the new head, signed | each voter | `proof.HeadVotes`, `driver` |
| audit | one contributor | `audit` |

Errors: in a member's or leader's task, one costs that attempt; when applying a decided round, one costs a retry, or a
download of the whole state; bytes that break a rule cost their sender's link.
"""
