"""Commands that cannot work exit with status 2, or 75 if they may work later, and one line names the cause."""

from __future__ import annotations

from tests.swarm.processes import Swarm

STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_what_contradicts_a_live_run_is_refused(swarm: Swarm) -> None:
    peer = swarm.start("p2ptrain join --steps 0 --sync-every 50")
    swarm.until_ready(peer)
    join = f"p2ptrain join --initial-peers {peer.addresses}"

    line = swarm.refusal(f"{join} --sync-every 7")
    assert "--sync-every: you gave 7, but run 'p2ptrain' trains with 50" in line

    out = peer.directory / "p2ptrain-p2ptrain"
    line = swarm.refusal(f"{join} --out {out}")
    assert f"--out {out}: another p2ptrain process uses this directory" in line
    line = swarm.refusal(f"{join} --identity {out / 'identity.key'}")
    assert f"identity {out / 'identity.key'} is in use by another process" in line

    address = peer.addresses.read_text(encoding="utf-8").split()[0].partition("/p2p/")[0]
    line = swarm.refusal(f"{join} --host-maddrs {address}")
    assert address in line
    assert "choose another" in line
    assert peer.running


def test_an_initial_peer_that_cannot_be_reached_is_refused(swarm: Swarm) -> None:
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"
    line = swarm.refusal(f"p2ptrain join --initial-peers {address}", status=75)  # it may be there later
    assert f"no initial peer can be reached: {address} (connection refused: nothing listens on that port)" in line


def test_an_address_that_is_none_is_refused(swarm: Swarm) -> None:
    line = swarm.refusal("p2ptrain join --initial-peers /ip4/127.0.0.1/tcp/4001")
    assert "'/ip4/127.0.0.1/tcp/4001' does not end in the peer's id" in line
