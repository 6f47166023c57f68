"""`p2ptrain.join` with a session that has no network: what a user is told."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
from typing import Any

import pytest
from torch import nn

import p2ptrain
from p2ptrain.errors import ConfigError
from p2ptrain.network.lan import Announcement
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.extras import EXTRAS
from tests.fakes import MADDR, FakeNetworkSession
from tests.network.test_lan import A, B

WARNING = (
    "no peers found for run 'x'; starting it, unless another peer does so first. If you expected peers, check "
    "run_id=; the run may have ended"
)


@pytest.mark.parametrize(
    ("initial_peers", "live", "resume", "warnings"),
    [
        ([MADDR], None, None, [WARNING]),
        ([MADDR], RunConfig(run_id="y"), None, [WARNING]),
        ([MADDR], RunConfig(run_id="x"), None, []),
        ([MADDR], None, {"step": 3}, []),
        ([], None, None, []),
    ],
)
def test_a_run_that_is_not_found_is_started_with_a_warning(
    initial_peers: list[str], live: RunConfig | None, resume: dict[str, int] | None, warnings: list[str],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("p2ptrain.api.NetworkSession", type("NetworkSession", (FakeNetworkSession,), {"live": live}))
    with caplog.at_level(logging.WARNING):
        peer = p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers=initial_peers, resume=resume)
    assert [record.getMessage() for record in caplog.records] == warnings
    assert getattr(peer, "founded", None) == (live is None or live.run_id == "y")


@pytest.mark.parametrize(("run_id", "sync_every", "length"), [("x", 7, 1000), ("y", RunConfig.sync_every, 0)])
def test_who_comes_back_alone_goes_on_with_the_settings_of_the_run(
    run_id: str, sync_every: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in its state. Another name is another run, which starts from that state."""
    monkeypatch.setattr("p2ptrain.api.NetworkSession", type("NetworkSession", (FakeNetworkSession,), {"live": None}))
    saved = RunConfig(run_id="x", sync_every=7, total_steps=1000)
    state = {"step": 3, "run": json.dumps(saved.stated())}
    run = p2ptrain.join(nn.Linear(2, 2), run_id=run_id, initial_peers=[MADDR], resume=state).run
    assert (run.run_id, run.sync_every, run.total_steps) == (run_id, sync_every, length)
    changed = p2ptrain.join(nn.Linear(2, 2), run_id="x", resume=state, diloco=p2ptrain.DiLoCo(sync_every=8)).run
    assert (changed.sync_every, changed.total_steps) == (8, 1000)


@pytest.mark.parametrize("run", ["[" * 100_000, "7", '{"protocol_version": 999}', '{"sync_every": "often"}'])
def test_settings_in_a_state_that_cannot_be_used_are_an_error(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.api.NetworkSession", type("NetworkSession", (FakeNetworkSession,), {"live": None}))
    with pytest.raises(ConfigError, match=r"the state to resume from holds settings that this version .* cannot use: "):
        p2ptrain.join(nn.Linear(2, 2), run_id="x", resume={"step": 3, "run": run})


def test_what_a_joiner_gives_need_not_go_together_with_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(run_id="x", inner_moments="averaged", round_codec="none")
    monkeypatch.setattr("p2ptrain.api.NetworkSession", type("NetworkSession", (FakeNetworkSession,), {"live": run}))
    given = p2ptrain.DiLoCo(inner_moments="averaged")
    peer = p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers=[MADDR], diloco=given)
    assert peer.run.inner_moments == "averaged"
    # Of a new run they must.
    with pytest.raises(ConfigError, match="inner_moments = 'averaged': must be local unless"):
        p2ptrain.join(nn.Linear(2, 2), run_id="x", diloco=given)
    # And each by itself always.
    with pytest.raises(ConfigError, match=r"outer_momentum = 2\.0: must be at least 0 and below 1"):
        p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers=[MADDR], diloco=p2ptrain.DiLoCo(outer_momentum=2.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("127.0.0.1:{}", r"cannot serve the page on 127\.0\.0\.1, port {}: .*in use; choose another port"),
        ("80:80:80", "dashboard = '80:80:80': must be PORT or HOST:PORT"),
        ("192.0.2.1:0", r"cannot serve the page on 192\.0\.2\.1, port 0: .*, or an address of this machine"),
    ],
)
def test_a_dashboard_that_cannot_be_is_refused_before_the_network_is_opened(
    given: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = type("NetworkSession", (FakeNetworkSession,), {})
    monkeypatch.setattr("p2ptrain.api.NetworkSession", session)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=message.format(port)):
            p2ptrain.join(nn.Linear(2, 2), run_id="x", dashboard=given.format(port))
    assert session.opened is None


def test_a_dashboard_without_its_extra_is_refused_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "dashboard", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"dashboard = '8080' needs no_such_package; .* 'p2ptrain\[dashboard\]'"):
        p2ptrain.join(nn.Linear(2, 2), run_id="x", dashboard=8080)


NEAR = Announcement(
    run_id="x", model="", parameters=6, peers=1, step=3, founder=A, peer_id=A,
    addresses=(f"/ip4/192.168.1.5/tcp/4001/p2p/{A}",),
)  # fmt: skip


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> type[FakeNetworkSession]:
    """A session of a live run, and a machine on a local network."""
    session = type("NetworkSession", (FakeNetworkSession,), {"live": RunConfig(run_id="x")})
    monkeypatch.setattr("p2ptrain.api.NetworkSession", session)
    monkeypatch.setattr("p2ptrain.api.hosts_of", lambda maddrs: ["192.168.1.2"])
    return session


def test_a_run_on_the_local_network_is_joined_by_its_name(
    opened: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(NEAR, run_id="y")
    monkeypatch.setattr("p2ptrain.api.look", lambda hosts: [other, NEAR])
    for lan in ("auto", "on"):  # in a container the latter is needed to be found by others
        p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers="lan", lan=lan)
        assert opened.opened is not None
        assert (opened.opened.initial_peers, opened.opened.founder) == (NEAR.addresses, A)
    with pytest.raises(ConfigError, match="'lan': finds open runs, where lan is 'auto' or 'on'"):
        p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers="lan", lan="off")


def test_a_run_that_is_not_on_the_local_network_is_started(
    opened: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2ptrain.api.look", lambda hosts: [])
    opened.live = None
    with caplog.at_level(logging.WARNING):
        peer = p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers="lan")
    assert [record.getMessage() for record in caplog.records] == [WARNING]
    assert getattr(peer, "founded", False)


def test_of_two_runs_of_one_name_the_user_chooses(
    opened: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    false = dataclasses.replace(NEAR, founder=B, peer_id=B)
    monkeypatch.setattr("p2ptrain.api.look", lambda hosts: [false, NEAR])
    with pytest.raises(ConfigError, match=f"found 2 runs named 'x'; give founder= one of {B}, {A}, or addresses"):
        p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers="lan")
    p2ptrain.join(nn.Linear(2, 2), run_id="x", initial_peers="lan", founder=A)
    assert opened.opened is not None
    assert opened.opened.founder == A


def test_a_ticket_in_place_of_a_list_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="initial_peers = 'p2pt1…': must be a list of addresses"):
        p2ptrain.join(nn.Linear(2, 2), initial_peers="p2pt1" + "ab" * 40)


def test_no_addresses_are_an_empty_list() -> None:
    addresses: Any = None
    with pytest.raises(ConfigError, match="initial_peers = None: must be a list of addresses"):
        p2ptrain.join(nn.Linear(2, 2), initial_peers=addresses)


def test_every_setting_of_fragments_and_rounds_can_be_given() -> None:
    of_the_command = {
        "protocol_version", "model", "model_layout", "data", "tokenizer", "vocab_size", "num_shards", "sharding",
        "context",
    }  # fmt: skip
    of_the_inner_optimizer = {
        "inner_optimizer", "lr", "muon_lr", "schedule", "warmup_steps", "beta2", "weight_decay", "grad_clip"
    }  # fmt: skip
    of_join = {"run_id", "total_steps", "run_seed"}
    fields = [field for part in (p2ptrain.Sparta, p2ptrain.DiLoCo) for field in dataclasses.fields(part)]
    given = [field.metadata.get("run", field.name) for field in fields]
    settings = {field.name for field in dataclasses.fields(RunConfig)}
    assert sorted(given) == sorted(settings - of_the_command - of_the_inner_optimizer - of_join)


@pytest.mark.parametrize("threads", [-1, 1.5, True, "2"])
def test_worker_threads_are_counted(threads: object) -> None:
    with pytest.raises(ConfigError, match="worker_threads"):
        p2ptrain.join(nn.Linear(2, 2), worker_threads=threads)  # type: ignore[arg-type]
