"""Metrics of made-up peers, in the documented format, to test the demo without a swarm."""

from __future__ import annotations

from p2ptrain.monitor.swarmview import SwarmView
from p2ptrain.protocol.event_log.events import Event

BEGAN_S = 1000.0
TOTAL_STEPS = 100


def start(number: int, t: float) -> Event:
    run = {"total_steps": TOTAL_STEPS}
    return {"event": "start", "t": t, "peer_id": f"Qm{number}", "maddrs": [f"/ip4/127.0.0.1/tcp/{number}"], "run": run}


def adopt(reason: str, t: float, *, round: int = -1, run_step: int = 0) -> Event:
    founded = reason == "founded the run"
    return {"event": "adopt", "t": t, "founded": founded, "reason": reason, "round": round, "run_step": run_step}


def step(step: int, t: float, *, loss: float | None = 2.0, exchange_s: float = 0.001) -> Event:
    return {"event": "step", "t": t, "step": step, "loss": loss, "tokens": 256, "exchange_s": exchange_s}


def fragments(t: float, *, sent: int, merged: int, skipped: dict[str, int], bytes_sent: int) -> Event:
    return {
        "event": "fragments", "t": t, "sent": sent, "merged": merged, "skipped": skipped, "bytes_sent": bytes_sent,
    }  # fmt: skip


def round_(number: int, t: float, *, by: tuple[str, ...], anchor: str = "aa" * 32, status: str = "committed") -> Event:
    return {
        "event": "round", "t": t, "lineage": "0-x", "round": number, "status": status, "contributors": list(by),
        "anchor_hash": anchor, "state_hash": anchor, "late": False, "bytes_sent": 500, "wall_s": 0.4,
        "reason": "no quorum",
    }  # fmt: skip


def sample(step: int, t: float, values: list[float]) -> Event:
    return {"event": "sample", "t": t, "step": step, "every": 10, "values": values}


def held_out(step: int, t: float, loss: float) -> Event:
    return {"event": "eval", "t": t, "step": step, "loss": loss}


def peers(t: float, *alive: str) -> Event:
    return {"event": "peers", "t": t, "alive": list(alive)}


def small_swarm() -> SwarmView:
    """Three peers that train to the end; the first is killed on the way, and a fourth joins late."""
    swarm = SwarmView(BEGAN_S, TOTAL_STEPS)
    for number in (1, 2, 3):
        swarm.started(number)
        swarm.apply(number, start(number, 1001))
        swarm.apply(number, adopt("founded the run" if number == 1 else "adopted the swarm's state", 1002))
        swarm.apply(number, sample(0, 1002.5, [1.0, 2.0, 4.0]))
        swarm.apply(number, held_out(0, 1002.5, 4.5))
    for at in range(1, 41):
        for number in (1, 2, 3):
            swarm.apply(number, step(at, 1003 + at / 10, loss=4.0 - at / 50))
    for number in (1, 2, 3):
        swarm.apply(number, round_(0, 1005, by=("Qm1", "Qm2", "Qm3")))
        swarm.apply(number, sample(40, 1007, [1.0, 2.0, 4.0 + number]))
        swarm.apply(number, held_out(40, 1007, 3.0))
        swarm.apply(number, fragments(1007, sent=20, merged=18, skipped={"superseded": 2}, bytes_sent=3500))
    swarm.killed(1, 1008.0)
    swarm.apply(2, peers(1008.2, "Qm3"))
    swarm.apply(3, peers(1008.4, "Qm2"))
    swarm.started(4, late=True)
    swarm.apply(4, start(4, 1009))
    swarm.apply(4, adopt("adopted the swarm's state", 1010, round=0, run_step=50))
    for at in range(51, TOTAL_STEPS + 1):
        for number in (2, 3, 4):
            swarm.apply(number, step(at, 1006 + at / 10, loss=2.5))
    for number in (2, 3, 4):
        swarm.apply(number, held_out(TOTAL_STEPS, 1016, 2.5 + number / 100))
        swarm.apply(number, round_(1, 1017, by=("Qm2", "Qm3", "Qm4"), anchor="bb" * 32))
        swarm.apply(number, held_out(TOTAL_STEPS, 1017.5, 2.4))
        swarm.apply(number, {"event": "stop", "t": 1018, "reason": "finished"})
    return swarm
