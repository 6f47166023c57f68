"""`p2ptrain join` from settings to a checkpoint, with a session that has no network."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import socket
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from p2ptrain.errors import ConfigError, RunMismatchError, UnreachableError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.initial_peers import nobody_found
from p2ptrain.settings.presets import PRESETS
from p2ptrain.settings.run_key import RunKey, make_key_file
from p2ptrain.settings.table import merge
from p2ptrain.settings.ticket import Ticket, ticket_text
from p2ptrain.signals import SIGNALS, interrupt_on_signals
from p2ptrain.training import checkpoint, job
from p2ptrain.training.data import Characters
from p2ptrain.training.data.prepare import prepare
from p2ptrain.training.data.tokenizer_file import train_tokenizer
from p2ptrain.training.join import _end_line, check_local, join_run
from p2ptrain.training.loop import TrainingEnd, _size_line
from p2ptrain.training.models import build
from p2ptrain.training.trainer import Trainer, TrainingData
from tests.fakes import MADDR, FakeNetworkSession, FakePeer
from tests.training.characters import VOCAB_SIZE

LIVE = RunConfig(
    run_id="r", model="gpt-demo", model_layout="layout", data="stdlib", total_steps=3, sync_every=2, lr=0.01
)


@pytest.fixture(autouse=True)
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeNetworkSession]]:
    fake = type("NetworkSession", (FakeNetworkSession,), {})
    monkeypatch.setitem(sys.modules, "p2ptrain.peer.session", types.SimpleNamespace(NetworkSession=fake))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield fake
    torch.set_num_threads(threads)


def _join(*, environ: dict[str, str] | None = None, **given: str) -> list[str]:
    lines: list[str] = []
    flags = {"run_id": "r", "threads": "1", "device": "cpu", **given}
    settings = merge(
        {name: (text,) if name == "initial_peers" else text for name, text in flags.items()}, environ or {}
    )
    join_run(settings, *check_local(settings), say=lines.append, on_progress=lambda progress: None)
    # The runs here are short on purpose.
    return [line for line in lines if not (line.startswith("warning: ") and line.endswith("or more --steps"))]


def test_addresses_that_cannot_be_noted_do_not_stop_training(
    session: type[FakeNetworkSession], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "p2ptrain-r" / ".peers.txt.tmp").mkdir(parents=True)  # where they are written first
    assert _join(steps="2")[-1].startswith("finished at step 2")
    assert "the addresses of the other peers could not be saved" in caplog.text


def test_a_founder_trains_and_prints_the_line_for_others(session: type[FakeNetworkSession]) -> None:
    lines = _join(steps="2", out="my run")
    assert f"p2ptrain join --initial-peers {MADDR} --run-id r" in lines
    assert not any("each peer adds --data" in line for line in lines)
    assert lines[0] == "started run 'r' (model gpt-demo, 2 steps) as peer QmFake"
    assert session.opened is not None
    assert session.opened.identity == "my run/identity.key"
    assert lines[-1].endswith("try: p2ptrain generate 'my run'")
    assert session.peer is not None
    assert session.peer.run.total_steps == 2
    assert session.peer.left == "finished"
    assert [path.name for path in checkpoint.checkpoints(Path("my run"))] == ["checkpoint-2"]


def test_it_is_said_that_a_model_without_a_context_has_short_windows(
    session: type[FakeNetworkSession], tmp_path: Path
) -> None:
    factory = "def make(vocab_size):\n    return torch.nn.Embedding(vocab_size, vocab_size)\n"
    (tmp_path / "without_context.py").write_text(f"import torch\n{factory}")
    lines = _join(steps="1", model="without_context:make")
    assert "--model without_context:make: has no attribute context; windows are 64 tokens" in lines


def test_a_model_without_values_is_refused(session: type[FakeNetworkSession], tmp_path: Path) -> None:
    factory = "def make(vocab_size):\n    return torch.nn.Embedding(vocab_size, vocab_size, device='meta')\n"
    (tmp_path / "without_values.py").write_text(f"import torch\n{factory}")
    with pytest.raises(ConfigError, match="parameter weight is on the meta device: materialise the model"):
        _join(steps="1", model="without_values:make")


def test_figures_for_prometheus_are_served_while_it_trains_and_not_after(session: type[FakeNetworkSession]) -> None:
    (line,) = (line for line in _join(steps="1", prometheus="0") if "Prometheus" in line)
    url = line.removeprefix("Prometheus metrics at ")
    with pytest.raises(URLError):
        urlopen(url, timeout=10)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("prometheus", "--prometheus {}: another program uses that port"),
        ("dashboard", "cannot serve the page on 127.0.0.1, port {}: .*in use; choose another port"),
    ],
)
def test_a_port_in_use_is_reported_before_the_network_is_started(
    session: type[FakeNetworkSession], flag: str, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=message.format(port)):
            _join(steps="1", **{flag: str(port)})
    assert session.opened is None


def test_a_joiner_takes_over_the_runs_settings(session: type[FakeNetworkSession]) -> None:
    session.live = LIVE
    lines = _join(initial_peers=MADDR)
    assert lines[0] == "joined run 'r' (model gpt-demo, 3 steps) as peer QmFake"
    assert session.peer is not None
    assert session.peer.run == LIVE
    assert session.peer.run_step == 3


def test_a_peer_that_finds_no_others_says_so_and_starts_the_run(session: type[FakeNetworkSession]) -> None:
    session.live = replace(LIVE, run_id="another")
    lines = _join(initial_peers=MADDR, steps="1")
    assert lines[0] == nobody_found("r", "--run-id")
    assert lines[1] == "started run 'r' (model gpt-demo, 1 steps) as peer QmFake"


def test_a_pinned_run_is_not_started_here(session: type[FakeNetworkSession]) -> None:
    for given in ({"founder": "Qm" + "a" * 44}, {"anchor": "AB" * 32}):
        with pytest.raises(ConfigError, match=r"no peer of that run is known; add --initial-peers or a ticket"):
            _join(steps="1", **given)
        assert session.peer is None


@pytest.mark.parametrize("by", ["the ticket", "--founder"])
def test_who_joins_a_pinned_run_is_told_so(session: type[FakeNetworkSession], by: str) -> None:
    session.live, founder = LIVE, "Qm" + "a" * 44
    ticket = ticket_text(Ticket("r", (f"/ip4/10.0.0.1/tcp/4001/p2p/{founder}",), founder))
    assert ticket is not None
    lines = _join(initial_peers=ticket) if by == "the ticket" else _join(initial_peers=MADDR, founder=founder)
    assert lines[0] == f"pinned by {by} to the run that {founder} founded: no other run is joined or started"
    assert not any(line.startswith("pinned") for line in _join(initial_peers=MADDR, out="other"))


def test_a_joiner_may_not_contradict_the_run(session: type[FakeNetworkSession]) -> None:
    session.live = LIVE
    with pytest.raises(RunMismatchError, match=r"--lr: you gave 0\.5, but run 'r' trains with 0\.01"):
        _join(initial_peers=MADDR, lr="0.5")
    assert session.peer is None


def test_a_joiner_is_told_that_its_preset_is_not_used(session: type[FakeNetworkSession]) -> None:
    session.live = replace(LIVE, fragment_fraction=0.0, outer_momentum=0.5)
    lines = _join(initial_peers=MADDR, preset="noloco", sync_every="2")
    assert lines[0] == (
        "--preset noloco: not used, because run 'r' has started with averaging = 'parts', outer_optimizer = 'nesterov'"
    )
    # Nor if the run has what the preset says, or is new.
    preset = PRESETS["noloco"]
    session.live = replace(LIVE, **dict(preset))
    assert lines[0] not in (again := _join(initial_peers=MADDR, preset="noloco", out="again"))
    assert not any(line.startswith("--preset") for line in again)
    assert not any(line.startswith("--preset") for line in _join(run_id="new", steps="1", preset="noloco"))


def test_a_run_without_peers_is_new(session: type[FakeNetworkSession]) -> None:
    _join(initial_peers=MADDR, steps="1")
    assert session.peer is not None
    assert session.peer.run.total_steps == 1


def test_where_every_checkpoint_is_damaged_nothing_is_started_afresh_unasked(session: type[FakeNetworkSession]) -> None:
    Path("p2ptrain-r/checkpoint-1").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"^--out p2ptrain-r: all of its checkpoints are damaged; move them away to start anew$"
    ):
        _join()
    assert session.peer is None


def test_the_same_command_again_continues(session: type[FakeNetworkSession]) -> None:
    session.live = replace(LIVE, total_steps=2)
    _join(initial_peers=MADDR)
    first = session.peer
    assert first is not None
    # The run has got further than this peer: move its checkpoint back by a step.
    saved = checkpoint.load_newest(Path("p2ptrain-r"))
    assert saved is not None
    checkpoint.save(Path("p2ptrain-r"), replace(saved, step=1, state={**saved.state, "peer": {"step": 1}}))
    lines = _join(initial_peers=MADDR)
    assert lines[0].startswith("continuing run 'r'")
    assert session.peer is not None
    assert session.peer.run_step == 2
    assert len(session.peer.losses) == 1
    # The stream of text continues too, so this batch is a new one.
    assert session.peer.losses[0] not in first.losses


def test_a_founder_continues_with_the_settings_of_its_checkpoint(session: type[FakeNetworkSession]) -> None:
    _join(steps="2", sync_every="7")
    lines = _join()
    assert lines == [
        "run 'r' is finished: 2 steps, see p2ptrain-r; start another with a new --run-id or --out, from these weights "
        "with --init-from p2ptrain-r"
    ]
    with pytest.raises(RunMismatchError, match=r"--sync-every: you gave 9, .* 7; .* checkpoint in p2ptrain-r"):
        _join(sync_every="9")


def test_who_missed_the_runs_last_round_may_make_up_for_it(session: type[FakeNetworkSession]) -> None:
    _join(steps="2")
    saved = checkpoint.load_newest(Path("p2ptrain-r"))
    assert saved is not None
    assert saved.info["finished"]
    checkpoint.save(Path("p2ptrain-r"), replace(saved, info={**saved.info, "finished": False}))
    assert _join()[0].startswith("continuing run 'r'")


def test_a_directory_holds_one_run(session: type[FakeNetworkSession]) -> None:
    _join(steps="1", out="A")
    session.opened = None
    with pytest.raises(ConfigError, match=r"^--out A: holds run 'r', not 'z'; give another --out$"):
        _join(out="A", run_id="z")
    assert session.opened is None


def test_a_closed_run_is_not_continued_without_a_key(session: type[FakeNetworkSession]) -> None:
    make_key_file(Path("friends.key"), bytes(32))
    _join(steps="1", run_key="friends.key", out="A")
    session.opened = None
    with pytest.raises(ConfigError) as caught:
        _join(out="A")
    assert str(caught.value) == "run 'r' in A is closed: give --run-key FILE, or a ticket that holds the key"
    assert session.opened is None
    ticket = ticket_text(Ticket("r", (f"/ip4/10.0.0.1/tcp/4001/p2p/Qm{'a' * 44}",), key=RunKey(bytes(32))))
    assert ticket is not None
    for given in ({"run_key": "friends.key"}, {"initial_peers": ticket}):
        assert "is finished" in _join(out="A", **given)[-1]


def test_who_has_no_key_file_is_told_how_to_invite_others(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"/ip4/10.0.0.1/tcp/4001/p2p/Qm{'a' * 44}"
    monkeypatch.setattr(FakePeer, "maddrs", (address,))
    session.live = LIVE
    ticket = ticket_text(Ticket("r", (address,), key=RunKey(bytes(32))))
    assert ticket is not None
    hint = "FILE is the run's key file; with --share-key a ticket is printed that holds the key, and needs no file"
    lines = _join(initial_peers=ticket)
    assert lines[lines.index(hint) - 1].endswith(" --run-key FILE")
    make_key_file(Path("friends.key"), bytes(32))
    assert hint not in _join(initial_peers=ticket, run_key="friends.key", out="other")


def test_a_key_closes_a_run_that_was_open(session: type[FakeNetworkSession]) -> None:
    make_key_file(Path("friends.key"), bytes(32))
    _join(steps="1", out="A")
    assert "is finished" in _join(out="A", run_key="friends.key")[-1]


def test_a_checkpoint_of_another_run_is_not_overwritten(session: type[FakeNetworkSession]) -> None:
    _join(steps="1", lr="0.5")
    session.live = LIVE
    different = r"--out p2ptrain-r: .*lr: 0.5 in the checkpoint, 0.01 in the run.*; give another --out"
    with pytest.raises(ConfigError, match=different):
        _join(initial_peers=MADDR)


def test_a_run_on_peoples_own_text_asks_for_ours(session: type[FakeNetworkSession], tmp_path: Path) -> None:
    session.live = replace(LIVE, data="text")
    with pytest.raises(ConfigError, match=r"add --data FILE or DIR"):
        _join(initial_peers=MADDR)
    (tmp_path / "text").write_text("some words " * 2000, encoding="utf-8")
    _join(initial_peers=MADDR, data="text")
    assert session.peer is not None
    with pytest.raises(RunMismatchError, match=r"--data stdlib: run 'r' trains on text that every peer brings; give"):
        _join(initial_peers=MADDR, data="stdlib", out="other")


def test_a_run_cannot_choose_code_of_this_machine(session: type[FakeNetworkSession], tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise AssertionError('imported')", encoding="utf-8")
    session.live = replace(LIVE, model="trap:model")
    with pytest.raises(ConfigError, match=r"code that you must have: add --model trap:model"):
        _join(initial_peers=MADDR)


def test_a_run_of_a_python_program_is_not_for_the_command_line(session: type[FakeNetworkSession]) -> None:
    session.live = replace(LIVE, model="")
    with pytest.raises(ConfigError, match=r"join it from Python with p2ptrain\.join\(model"):
        _join(initial_peers=MADDR)


def test_local_mistakes_are_reported_before_the_network_is_started(session: type[FakeNetworkSession]) -> None:
    for given in (
        {"data": "none"}, {"model": "nope"}, {"device": "gpu"}, {"initial_peers": "nobody"}, {"batch_tokens": "1" * 18},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            _join(**given)
    assert session.opened is None
    assert not Path("p2ptrain-r").exists()


def test_addresses_are_written_for_others(session: type[FakeNetworkSession]) -> None:
    _join(steps="1", write_addresses="shared/addresses")
    assert Path("shared/addresses").read_text(encoding="utf-8").splitlines()[0] == MADDR
    _join(environ={"P2PTRAIN_INITIAL_PEERS": "shared/addresses"}, steps="1", out="second")
    assert session.opened is not None
    assert session.opened.initial_peers[0] == MADDR


def test_the_identity_may_be_kept_elsewhere(session: type[FakeNetworkSession]) -> None:
    _join(steps="1", identity="keys/mine.key")
    assert session.opened is not None
    assert session.opened.identity == "keys/mine.key"


def test_a_restarted_founder_finds_the_others_again(session: type[FakeNetworkSession]) -> None:
    _join(steps="2")
    assert session.opened is not None
    assert session.opened.remembered_peers == ()
    _join()
    assert (session.opened.initial_peers, session.opened.remembered_peers) == ((), FakePeer.alive_maddrs)
    session.unreachable = FakePeer.alive_maddrs
    lines = _join(steps="2")
    # It trains alone, and keeps looking for the other peers.
    assert (session.opened.remembered_peers, session.alone) == (FakePeer.alive_maddrs, True)
    # It has named no initial peer, so it need not read of one, or of all addresses that another machine had.
    assert lines[0] == (
        "none of the peers saved in peers.txt answers. Continuing from the checkpoint of step 2, alone until a peer is "
        "found"
    )
    shutil.rmtree("p2ptrain-r/checkpoint-2")
    lines = _join(steps="2")
    assert (session.opened.remembered_peers, session.alone) == ((), False)
    assert lines[0].startswith("none of the peers saved in peers.txt can be reached, and this peer has no checkpoint: ")


def test_a_restarted_joiner_that_finds_no_peers_continues_from_its_checkpoint(
    session: type[FakeNetworkSession],
) -> None:
    session.unreachable = (MADDR, *FakePeer.alive_maddrs)
    with pytest.raises(UnreachableError):
        _join(steps="2", initial_peers=MADDR)
    session.unreachable = ()
    _join(steps="2", initial_peers=MADDR)
    session.unreachable = (MADDR, *FakePeer.alive_maddrs)
    lines = _join(initial_peers=MADDR)
    assert session.opened is not None
    assert (session.opened.initial_peers, session.opened.remembered_peers) == ((MADDR,), FakePeer.alive_maddrs)
    assert session.alone
    assert lines[0].endswith("Continuing from the checkpoint of step 2, alone until a peer is found")


BAD_ADDRESSES = (
    "/ip4/192.168.7.9/tcp/99999/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "/ip4/192.168.7.9/tcp/4001",
    "/ip4/192.168.7.9/tcp/4001/p2p/QmJunk",
    "/ip4/192.168.7.9/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N#",
    "# a comment",
    "",
)


def test_what_other_peers_call_their_addresses_is_noted_where_it_is_one(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    (good,) = FakePeer.alive_maddrs
    monkeypatch.setattr(FakePeer, "alive_maddrs", (*BAD_ADDRESSES, good.replace("/tcp/4001", "/tcp/4001\n"), good))
    _join(steps="2")
    assert Path("p2ptrain-r/peers.txt").read_text(encoding="utf-8") == f"{good}\n"
    monkeypatch.setattr(FakePeer, "alive_maddrs", BAD_ADDRESSES)
    _join(steps="2", out="other")
    assert not Path("other/peers.txt").exists()


def test_noted_addresses_that_are_none_are_skipped_with_a_warning(
    session: type[FakeNetworkSession], caplog: pytest.LogCaptureFixture
) -> None:
    (good,) = FakePeer.alive_maddrs
    Path("p2ptrain-r").mkdir()
    noted = "\n".join([*BAD_ADDRESSES[:3], good, good])
    Path("p2ptrain-r/peers.txt").write_bytes(noted.encode() + b"\n\xff\x00\n")
    _join(steps="2")
    assert session.opened is not None
    assert session.opened.remembered_peers == (good,)
    for line in BAD_ADDRESSES[:3]:
        assert f"{line!r} is not an address; the line is skipped" in caplog.text


class _Seen:
    """Replaces `job.Trainer` and records the spans that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[np.ndarray | None] = []
        make = job.Trainer

        def trainer(model: torch.nn.Module, data: TrainingData, *arguments: object, **named: object) -> Trainer:
            self.spans.append(data.spans)
            return make(model, data, *arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(job, "Trainer", trainer)


def test_peers_train_on_shards_that_share_nothing(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _Seen(monkeypatch)
    for shard in ("0", "1"):
        lines = _join(steps="1", num_shards="2", shard=shard, out=f"out{shard}")
        assert f"training on shard {shard} of 2 (iid): " in lines[0]
        assert session.peer is not None
        (event,) = [fields for name, fields in session.peer.events if name == "shard"]
        assert (event["shard"], event["sharding"], len(event["sizes"])) == (int(shard), "iid", 2)
        assert event["partition_sha256"][:12] in lines[0]
    first, second = (set(map(tuple, spans.tolist())) for spans in seen.spans if spans is not None)
    covered = sorted(first | second)
    assert not first & second
    assert covered[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(covered))


def test_without_shards_all_of_the_text_is_everybodys(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _Seen(monkeypatch)
    _join(steps="1")
    assert seen.spans == [None]
    assert session.peer is not None
    assert "shard" not in dict(session.peer.events)


def test_the_memory_check_knows_the_error_buffers_of_the_run(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()
    monkeypatch.setattr(
        "p2ptrain.training.join.quick_look", lambda *given, vectors, **named: seen.append(vectors) or []
    )
    _join(steps="1", round_codec="int2")
    assert seen == [2]


def test_a_cpu_begins_with_the_windows_that_fit(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "free_memory_bytes", lambda: 3_000_000)  # a window of the demo's model takes 1.8 MB
    lines = _join(steps="1")
    assert any("a step is 4 windows of 64 tokens, 1 at once;" in line for line in lines)
    with pytest.raises(ConfigError, match=r"--eval-tokens \d+: their ids alone take .* MB, and 3.0 MB of memory are"):
        _join(steps="1", run_id="other", eval_tokens="1" * 9)


def test_the_line_of_the_start_counts_one_window_as_one() -> None:
    trainer: Any = types.SimpleNamespace(
        model=torch.nn.Linear(999, 1000), step_windows=1, context=1024, eval_windows=4, micro_batch=1,
        ranks=types.SimpleNamespace(size=1),
    )  # fmt: skip
    line = "1.0M parameters; a step is 1 window of 1,024 tokens; evaluating on 4,096 held-out tokens first"
    assert _size_line(trainer) == line


def test_a_joiner_takes_the_shard_of_its_identity(session: type[FakeNetworkSession]) -> None:
    session.live = replace(LIVE, num_shards=5, sharding="unbalanced")
    lines = _join(initial_peers=MADDR)
    assert f"training on shard {session.live.shard_of('QmFake')} of 5 (unbalanced): " in lines[0]


def test_a_shard_that_is_not_there_is_refused(session: type[FakeNetworkSession]) -> None:
    with pytest.raises(ConfigError, match=r"--shard 2: must be 0 to 1 in run 'r', which has num_shards = 2"):
        _join(num_shards="2", shard="2")
    with pytest.raises(ConfigError, match=r"--shard 2: has no meaning in run 'r', which has num_shards = 0"):
        _join(shard="2")
    with pytest.raises(ConfigError, match=r"--sharding clusters: has no meaning without shards; add --num-shards"):
        _join(sharding="clusters")
    with pytest.raises(ConfigError, match=r"num_shards = 99999: must be between 1 and the number of blocks"):
        _join(num_shards="99999", sharding="clusters", out="other")
    assert session.peer is None


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Weights of the demo model with a seed that no test uses, in `weights.safetensors`."""
    state = build("gpt-demo", vocab_size=VOCAB_SIZE, seed=99).state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    return state


def _entered_with(session: type[FakeNetworkSession], weights: dict[str, torch.Tensor]) -> bool:
    assert session.entered is not None
    return all(torch.equal(session.entered[name], tensor) for name, tensor in weights.items())


def test_a_founder_starts_from_given_weights(
    session: type[FakeNetworkSession], weights: dict[str, torch.Tensor]
) -> None:
    _join(steps="1", out="plain")
    assert not _entered_with(session, weights)
    lines = _join(steps="1", init_from="weights.safetensors")
    assert lines[0] == "starting from the weights of weights.safetensors"
    assert _entered_with(session, weights)
    # Start another run from the end of this one: from its directory, or from one checkpoint in it.
    saved = checkpoint.load_newest(Path("p2ptrain-r"))
    assert saved is not None
    for place in ("p2ptrain-r", "p2ptrain-r/checkpoint-1"):
        _join(steps="1", run_id="next", out=place.replace("/", "-") + "-next", init_from=place)
        assert _entered_with(session, saved.state["model"])


def test_a_joiner_and_a_restart_say_that_other_weights_are_taken(
    session: type[FakeNetworkSession], weights: dict[str, torch.Tensor]
) -> None:
    session.live = replace(LIVE, total_steps=9)
    lines = _join(initial_peers=MADDR, init_from="weights.safetensors")
    assert lines[0] == "--init-from weights.safetensors: not used, because run 'r' has started; its weights are used"
    assert not _entered_with(session, weights)
    session.live = None
    session.unreachable = FakePeer.alive_maddrs
    _join(steps="2", out="own")
    saved = checkpoint.load_newest(Path("own"))
    assert saved is not None
    shutil.rmtree("own/checkpoint-2")
    checkpoint.save(Path("own"), replace(saved, step=1, state={**saved.state, "peer": {"step": 1}}))
    lines = _join(out="own", init_from="weights.safetensors")
    assert any("not used, because the checkpoint of step 1 in own is continued" in line for line in lines)
    assert _entered_with(session, saved.state["model"])


def test_one_of_several_that_found_at_once_says_so(
    session: type[FakeNetworkSession], weights: dict[str, torch.Tensor]
) -> None:
    lines = _join(steps="1", initial_peers=MADDR, init_from="weights.safetensors")
    assert lines[1].endswith("weights.safetensors, unless another peer starts the run first")
    assert _entered_with(session, weights)


def test_weights_that_do_not_fit_are_refused(
    session: type[FakeNetworkSession], weights: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(ConfigError, match=r"--init-from nowhere: cannot be read"):
        _join(init_from="nowhere")
    assert session.opened is None
    with pytest.raises(ConfigError, match=r"--init-from weights\.safetensors: .* of the model's tensors are"):
        _join(init_from="weights.safetensors", model="gpt-small")
    assert session.entered is None


def _put_back() -> None:
    """Make the newest checkpoint one of the step before, so that the same command has something to do."""
    saved = checkpoint.load_newest(Path("p2ptrain-r"))
    assert saved is not None
    step = saved.step - 1
    checkpoint.save(Path("p2ptrain-r"), replace(saved, step=step, state={**saved.state, "peer": {"step": step}}))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be: that is the question. " * 2000)
    return str(path)


def test_a_run_is_started_with_a_tokenizer_made_from_its_text(session: type[FakeNetworkSession], text: str) -> None:
    lines = _join(steps="1", data=text, tokenizer="train:300")
    assert lines[0] == f"making a tokenizer of 300 ids from {text}"
    assert "--tokenizer train:300: the text has pairs for" in lines[1]
    file = Path("p2ptrain-r/tokenizer.json").read_bytes()
    assert session.peer is not None
    assert session.peer.run.tokenizer == hashlib.sha256(file).hexdigest()
    assert 257 <= session.peer.run.vocab_size < 300
    assert session.served_tokenizer == file
    # A restart takes the saved one, and makes no other.
    _put_back()
    again = _join(data=text, tokenizer="train:300")
    assert again[0] == "--tokenizer train:300: not used, because run 'r' is continued with its own"
    assert again[1].startswith("continuing run 'r'")
    assert session.served_tokenizer == file


def test_a_joiner_gets_the_tokenizer_from_the_others(session: type[FakeNetworkSession], text: str) -> None:
    made = train_tokenizer([Path(text).read_text()], 280)
    session.live = replace(LIVE, data="text", tokenizer=made.identity, vocab_size=made.vocab_size)
    with pytest.raises(ConfigError, match=rf"run 'r': no peer that answers has its tokenizer, {made.identity[:12]}"):
        _join(initial_peers=MADDR, data=text)
    session.tokenizer = made.file
    assert "asking the peers of run 'r' for its tokenizer" in _join(initial_peers=MADDR, data=text)
    assert session.served_tokenizer == made.file == Path("p2ptrain-r/tokenizer.json").read_bytes()
    session.tokenizer = None  # it has it now
    _join(initial_peers=MADDR, data=text)


def test_a_tokenizer_that_is_not_the_runs_is_refused(session: type[FakeNetworkSession], text: str) -> None:
    session.live = replace(LIVE, data="text")
    with pytest.raises(RunMismatchError, match=r"--tokenizer: you gave 'bytes', but run 'r' trains with 'chars'"):
        _join(initial_peers=MADDR, data=text, tokenizer="bytes")
    session.live = replace(LIVE, data="text", tokenizer="bytes", vocab_size=257)
    _join(initial_peers=MADDR, data=text)


def test_a_run_whose_settings_and_tokenizer_differ_is_refused(session: type[FakeNetworkSession], text: str) -> None:
    made = train_tokenizer([Path(text).read_text()], 280)
    session.live = replace(LIVE, data="text", tokenizer=made.identity, vocab_size=made.vocab_size + 1)
    session.tokenizer = made.file
    with pytest.raises(ConfigError, match=rf"run 'r' says {made.vocab_size + 1} ids, and its tokenizer has"):
        _join(initial_peers=MADDR, data=text)


def test_nanogpts_data_is_trained_on_as_it_is(session: type[FakeNetworkSession], tmp_path: Path) -> None:
    (tmp_path / "owt").mkdir()
    for name in ("train", "val"):
        (np.arange(5000) % 200).astype(np.uint16).tofile(tmp_path / "owt" / f"{name}.bin")
    _join(steps="1", data=str(tmp_path / "owt"))
    assert session.peer is not None
    assert (session.peer.run.data, session.peer.run.tokenizer, session.peer.run.vocab_size) == ("text", "ids", 50257)
    with pytest.raises(ConfigError, match=r"--tokenizer train:300: is made from text, and --data .*owt holds tokens"):
        _join(steps="1", data=str(tmp_path / "owt"), tokenizer="train:300", out="other")


def test_token_files_work_without_a_tokenizer(session: type[FakeNetworkSession], tmp_path: Path) -> None:
    (np.arange(5000) % 200).astype(np.uint16).tofile(tmp_path / "train.bin")
    session.live = replace(LIVE, data="text", tokenizer="0" * 64, vocab_size=300)
    _join(initial_peers=MADDR, data=str(tmp_path / "train.bin"))
    assert session.served_tokenizer == b""
    session.live = replace(LIVE, data="text", tokenizer="0" * 64, vocab_size=150)
    with pytest.raises(ConfigError, match=r"train.bin, token \d+ .*: id \d+ is beyond the vocabulary of 150"):
        _join(initial_peers=MADDR, data=str(tmp_path / "train.bin"), out="other")


def test_prepared_data_brings_its_tokenizer(session: type[FakeNetworkSession], text: str, tmp_path: Path) -> None:
    prepare(
        (text,), tmp_path / "data", tokenizer="train:270", field="text", split="train", held_out=0.0, jobs=1,
        say=lambda line: None, on_progress=lambda progress: None,
    )  # fmt: skip
    _join(steps="1", data=str(tmp_path / "data"))
    file = (tmp_path / "data" / "tokenizer.json").read_bytes()
    assert session.peer is not None
    assert session.peer.run.tokenizer == hashlib.sha256(file).hexdigest()
    with pytest.raises(ConfigError, match=r"was prepared with tokenizer .*, not bytes; prepare it again"):
        _join(steps="1", data=str(tmp_path / "data"), tokenizer="bytes", out="other")
    session.live = replace(LIVE, data="text")
    with pytest.raises(
        RunMismatchError,
        match=r"data: was prepared with the tokenizer file \w{12}…, but run 'r' has the tokenizer 'chars'; give the "
        r"text itself as --data, .* or prepare it again with --tokenizer chars; or choose another --run-id",
    ):
        _join(initial_peers=MADDR, data=str(tmp_path / "data"), out="third")
    session.live = replace(LIVE, data="text", tokenizer="1" * 64)
    with pytest.raises(RunMismatchError, match=r"has the tokenizer file 1{12}…; .* --tokenizer tokenizer\.json \("):
        _join(initial_peers=MADDR, data=str(tmp_path / "data"), out="third")


def test_a_sample_of_the_models_text_is_written(session: type[FakeNetworkSession]) -> None:
    lines = _join(steps="5", sample_every="2")
    samples = [line for line in lines if line.startswith("sample at step")]
    assert [line.split(":")[0] for line in samples] == ["sample at step 2", "sample at step 4"]
    assert all(len(line) > 100 for line in samples)


def test_a_sample_without_a_tokenizer_is_reported_and_training_goes_on(
    session: type[FakeNetworkSession], tmp_path: Path
) -> None:
    (np.arange(5000) % 200).astype(np.uint16).tofile(tmp_path / "train.bin")
    lines = _join(steps="3", data=str(tmp_path / "train.bin"), sample_every="1", model="gpt-demo")
    assert any(line.startswith("--sample-every: not used") for line in lines)
    assert lines[-1].startswith("finished at step 3: held-out ")
    assert lines[-1].endswith("try: p2ptrain generate p2ptrain-r --tokenizer FILE.json")
    assert "each peer adds --data with text of its own" in lines


def test_a_tokenizer_to_be_made_is_not_used_where_the_run_has_one(session: type[FakeNetworkSession], text: str) -> None:
    session.live = replace(LIVE, data="text")
    lines = _join(initial_peers=MADDR, data=text, tokenizer="train:300")
    assert "--tokenizer train:300: not used, because run 'r' has started with its own" in lines


def test_muon_and_its_schedule_are_settings_of_the_run(session: type[FakeNetworkSession]) -> None:
    _join(steps="2", inner_optimizer="muon", schedule="wsd", muon_lr="0.01")
    assert session.peer is not None
    assert (session.peer.run.inner_optimizer, session.peer.run.schedule) == ("muon", "wsd")
    _put_back()
    assert _join()[0].startswith("continuing run 'r'")  # with Muon's state
    with pytest.raises(RunMismatchError, match=r"--inner-optimizer: you gave 'adamw', but run 'r' trains with 'muon'"):
        _join(inner_optimizer="adamw")
    with pytest.raises(ConfigError, match=r"--inner-moments 'averaged': must be local with .*'muon'"):
        _join(out="other", inner_optimizer="muon", inner_moments="averaged", round_codec="none")


@pytest.mark.parametrize("stage", ["find_run", "find_tokenizer", "enter"])
def test_a_signal_while_it_joins_ends_it_and_closes_the_network(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    session.live = replace(LIVE, tokenizer="ab" * 32, vocab_size=300)
    session.tokenizer = None
    closed: list[str] = []
    monkeypatch.setattr(session, "__exit__", lambda self, *exception: closed.append(stage))

    def interrupted(*arguments: object, **given: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    if stage == "enter":
        session.live = LIVE
    monkeypatch.setattr(session, stage, interrupted)
    try:
        interrupt_on_signals()
        with pytest.raises(KeyboardInterrupt):
            _join(initial_peers=MADDR)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert closed == [stage]
    assert not checkpoint.checkpoints(Path("p2ptrain-r"))
    assert Path("p2ptrain-r").is_dir()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_was_interrupted_ends_as_if_it_was_not(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, optimizer: str
) -> None:
    """Weights, optimizer, position in the data, random states, micro-batch and schedule, by the same command."""
    np.arange(9000, dtype="<u2").__mod__(251).tofile(tmp_path / "train.bin")
    (tmp_path / "drops.py").write_text(
        "import torch\nfrom p2ptrain.training.models import GPT, GPTConfig\n"
        "def model():\n"
        "    gpt = GPT(GPTConfig(vocab_size=251, layers=1, heads=2, width=16, context=16))\n"
        "    model = torch.nn.Sequential(gpt, torch.nn.Dropout(0.2))\n"
        "    model.context = 16\n"
        "    return model\n",
        encoding="utf-8",
    )
    before = {number: signal.getsignal(number) for number in SIGNALS}
    step, stops_at = FakePeer.step, set[int]()

    def stopped(self: FakePeer, **given: Any) -> object:
        if self.run_step + 1 in stops_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, **given)

    monkeypatch.setattr(FakePeer, "step", stopped)
    losses = dict[str, list[float | None]]()
    try:
        for out, stops in (("whole", ()), ("halves", (5, 9))):
            stops_at |= set(stops)
            losses[out] = []
            for run_step in (*stops, 12):
                lines = _join(
                    steps="12", out=out, data="train.bin", tokenizer="ids:251", model="drops:model", seed="7",
                    inner_optimizer=optimizer, micro_batch="2", eval_every="4",
                )  # fmt: skip
                assert session.peer is not None
                assert lines[-1].startswith(f"{'finished' if run_step == 12 else 'interrupted'} at step {run_step}")
                losses[out] += session.peer.losses
                for number, handler in before.items():
                    signal.signal(number, handler)
    finally:
        sys.modules.pop("drops", None)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert losses["halves"] == losses["whole"]
    whole, halves = (checkpoint.load(Path(out) / "checkpoint-12", ["model", "trainer"]) for out in losses)
    assert halves.state["trainer"]["windows"] == whole.state["trainer"]["windows"]
    for name, tensor in whole.state["model"].items():
        assert torch.equal(halves.state["model"][name], tensor)


@pytest.mark.parametrize(
    ("reason", "rounds", "sync_every", "said"),
    [
        ("finished", 109, 5, "finished at step 1600 after 109 of 320 planned rounds, not saved in "),
        ("finished", 300, 5, "finished at step 1600, not saved in "),
        ("finished", 1, 2000, "finished at step 1600, not saved in "),
        ("interrupted", 109, 5, "interrupted at step 1600, not saved in "),
    ],
)
def test_the_last_line_says_if_a_run_made_fewer_rounds_than_its_h_planned(
    tmp_path: Path, reason: Any, rounds: int, sync_every: int, said: str
) -> None:
    run = RunConfig(run_id="r", sync_every=sync_every, total_steps=1600)
    assert _end_line(TrainingEnd(reason), run, 1600, rounds, tmp_path, Characters(), "again").startswith(said)
