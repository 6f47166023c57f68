"""The commands: help with examples, results, and errors of one line with exit status 2."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import queue
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2ptrain.cli.estimate import estimate
from p2ptrain.cli.join import COMMON, PairSteps, format_progress
from p2ptrain.cli.main import cli, main
from p2ptrain.errors import ConfigError
from p2ptrain.monitor.estimate import estimate_run
from p2ptrain.protocol.links.limits import Struck
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.link import Link
from p2ptrain.settings.presets import PRESETS
from p2ptrain.settings.table import RUN_SETTINGS, SETTINGS
from p2ptrain.training import checkpoint
from p2ptrain.training.models import build
from p2ptrain.training.progress import TrainingProgress
from tests.fakes import MADDR, FakeMember, FakeNetworkSession
from tests.training.characters import VOCAB_SIZE

COMMANDS = (
    ["join"],
    ["find"],
    ["bootstrap"],
    ["peers"],
    ["dashboard"],
    ["doctor"],
    ["estimate"],
    ["generate"],
    ["config", "show"],
)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> type[FakeNetworkSession]:
    fake = type("NetworkSession", (FakeNetworkSession,), {})
    module = types.SimpleNamespace(NetworkSession=fake, OPEN_TIMEOUT_S=60.0, MEMBERS_TIMEOUT_S=30.0)
    monkeypatch.setitem(sys.modules, "p2ptrain.peer.session", module)
    return fake


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def without_a_local_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.network.lan.hosts_of", lambda maddrs: [])


def _output(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def _none_found(*arguments: str) -> Result:
    """The result of `p2ptrain peers` for a run without peers."""
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    return result


def _python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def _run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the real command in another process."""
    return _python("-m", "p2ptrain", *arguments, **environ)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches_with_an_example(command: list[str]) -> None:
    text = _output(*command, "--help")
    assert f"    p2ptrain {' '.join(command)}" in text


def test_the_list_of_commands_describes_each_whole_in_80_columns() -> None:
    result = CliRunner().invoke(cli, ["--help"], terminal_width=80)
    assert "simulate " in result.stdout
    assert "..." not in result.stdout.partition("Commands:")[2]


@pytest.mark.parametrize("command", COMMANDS[1:5], ids=" ".join)
def test_help_names_no_option_that_the_command_lacks(command: list[str]) -> None:
    text = _output(*command, "--help")
    known = {option for parameter in cli.commands[command[0]].params for option in parameter.opts} | {"--help"}
    # The line of another command, in the examples, has options of its own.
    own = " ".join(line for line in text.splitlines() if "p2ptrain join" not in line)
    assert set(re.findall(r"--[a-z][a-z-]+", own)) <= known
    assert {name.lower() for name in re.findall(r"P2PTRAIN_(\w+)=", text)} <= {
        p.name for p in cli.commands[command[0]].params
    }


@pytest.mark.parametrize("command", ["join", "peers", "dashboard", "doctor"])
def test_help_says_what_a_ticket_is(command: str) -> None:
    text = " ".join(_output(command, "--help").split())
    assert "[TICKET] Ticket that `p2ptrain join` printed, a file that holds one, or an initial peer." in text


def test_help_shows_every_setting_with_its_default() -> None:
    text = " ".join((_output("join", "--help-all") + _output("dashboard", "--help")).split())
    for setting in SETTINGS.values():
        assert f"{setting.flag} {setting.metavar} " in text
        if isinstance(setting.default, (int, float)):
            assert f"[default: {setting.default_text}]" in text


def test_help_of_join_shows_what_most_people_use_and_help_all_the_rest() -> None:
    short, whole = _output("join", "--help"), _output("join", "--help-all")
    options = set(re.findall(r"^  (?:-., )?(--[a-z-]+)", whole, re.MULTILINE))
    shown = set(re.findall(r"^  (?:-., )?(--[a-z-]+)", short, re.MULTILINE))
    of_command = {"--config", "--plain", "--share-key", "--new", "--qr", "--help-all", "--help"}
    assert shown == {SETTINGS[name].flag for name in COMMON} | of_command
    assert len(COMMON) == 15
    assert f"{len(options - shown)} more options: p2ptrain join --help-all" in short
    assert "more options" not in whole


@pytest.mark.processes
def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "sys.argv = ['p2ptrain', 'join', '--help']\n"
        "from p2ptrain.cli.main import main\n"
        "main()\n"
        "heavy = {'torch', 'numpy', 'hivemind', 'trio', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = _python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
def test_an_estimate_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['trio'] = None\n"
        "sys.argv = ['p2ptrain', 'estimate', '--model', 'gpt2-124m']\n"
        "from p2ptrain.cli.main import main\n"
        "main()\n"
    )
    done = _python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("124M parameters, 8 peers, 100 Mbit/s down and 100 up, ")


def test_an_estimate_as_json_and_of_models_without_a_size() -> None:
    given = json.loads(_output("estimate", "--params", "0.1M", "--rate-up", "20", "--json"))
    assert given["parameters"] == 100_000
    assert given["rate_up_mbit"] == 20
    assert given["round_s"] == given["transfer_s"] + given["round_trips_s"] + given["compute_s"]
    assert given["advice"]
    assert _output("estimate", "--preset", "diloco").startswith("151M parameters")
    assert _output("estimate", "--preset", "diloco", "--params", "5M").startswith("5M parameters")
    Path("mine.py").write_text(
        "import torch\ndef tiny(vocab_size): return torch.nn.Embedding(vocab_size, vocab_size)\n"
    )
    assert _output("estimate", "--model", "mine:tiny").startswith(f"{VOCAB_SIZE**2 / 1000:.4g}k parameters")


@pytest.mark.parametrize("changes", [{}, {"averaging": "gather"}, {"round_codec": "topk"}, PRESETS["noloco"]])
def test_an_estimate_takes_the_settings_that_it_depends_on(changes: dict[str, object]) -> None:
    asked = set()
    run = RunConfig(**{SETTINGS[name].field_name: value for name, value in changes.items()})  # type: ignore[arg-type]

    class Noting:
        def __getattr__(self, name: str) -> object:
            asked.add(name)
            return getattr(run, name)

    estimate_run(Noting(), 10**6, Link(peers=100))  # type: ignore[arg-type]
    flags = {flag for option in estimate.params for flag in option.opts}
    assert "max_contributors" in asked
    # These two change no size.
    asked -= {"run_seed", "round_mean"}
    assert {s.flag for s in RUN_SETTINGS if s.field_name in asked} <= flags


def test_an_estimate_says_which_values_are_assumed() -> None:
    assert _output("estimate", "--params", "5M", "--rate", "50", "--peers", "4").splitlines()[-1] == (
        "assumed: --rtt 60, --step-ms 1000, --cores 8, --sync-every 200"
    )
    given = ["--rate", "50", "--peers", "4", "--rtt", "60", "--step-ms", "1000", "--cores", "8", "--sync-every", "99"]
    assert "assumed" not in _output("estimate", "--params", "5M", *given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jion"], "No such command 'jion'. Did you mean 'join'? (see p2ptrain --help)"),
        (["join", "--lr", "fast"], "--lr: 'fast' is not a number, such as 0.003"),
        (["join", "--sync-evry", "5"], "No such option '--sync-evry'. Did you mean '--sync-every'? (see p2ptrain join"),
        (["join", "--sync-every"], "(see p2ptrain join --help)"),
        (["join", "--initial-peers", "localhost"], "no such file, and not a ticket or an address"),
        (["join", "--initial-peers", "lan"], "to join a run on the local network, give --lan join instead"),
        (["join", "--data", "none"], "--data none: no such file or directory; give text, or leave it out"),
        (["join", "--block_size=256"], "No such option '--block_size'. Did you mean '--context'? (see p2ptrain join"),
        (["join", "--max-iters", "9"], "No such option '--max-iters'. Did you mean '--steps'? (see p2ptrain join"),
        (["bootstrap", "--max-iters", "9"], "No such option '--max-iters'. "),
        (["join", "--model", "gpt-dmo"], "did you mean gpt-demo?"),
        (["join", "-c", "none.toml"], "none.toml: cannot be read"),
        (["peers"], "--initial-peers is required; give the address of a peer"),
        (["generate", "none"], "none: no such directory"),
        (["join", "--data", "~nobody-of-this-name/text"], "--data ~nobody-of-this-name/text: "),
        (["join", "--run-key", "~nobody-of-this-name/key"], "~nobody-of-this-name/key"),
        (["estimate"], "--params is required; give the number of parameters, such as 124M, or --model"),
        (["estimate", "--params", "12X"], "--params: '12X' must be a number of parameters from 1k to 1000B"),
        (["estimate", "--params", "5M", "--rate", "0"], "--rate: 0.0 must be between 0.01 and 1000000"),
        (["estimate", "--params", "5M", "--rtt", "60ms"], "--rtt: '60ms' is not a number, such as 60"),
        (["estimate", "--params", "5M", "--peers", "5000"], "from 2 to 1000 (larger swarms were never tried)"),
        (["estimate", "--params", "5M", "--model", "gpt-small"], "--params and --model: each gives the number"),
        (["estimate", "--params", "5M", "--sync-every", "0"], "--sync-every: 0 must be a whole number, 1 or more"),
        (["simulate", "--peers", "0"], "--peers: 0 must be from 1 to 1000"),
        (["simulate", "--sync-every", "0"], "--sync-every: 0 must be a whole number, 1 or more"),
        (
            ["simulate", "--model", "x"],
            "No such option '--model'; give --set model=VALUE (see p2ptrain simulate --help",
        ),
        (["simulate", "--round-codec=int4"], "No such option '--round-codec'; give --set round_codec=VALUE"),
        (["simulate", "--step-time", "-1"], "--step-time: -1.0 must be a finite number above 0"),
        (["simulate", "--out", "/dev/null/x"], "directory /dev/null/x cannot be used (Not a directory); give one"),
        (["reproduce", "s7", "--out", "/dev/null/x"], "directory /dev/null/x cannot be used (Not a directory)"),
        (["generate", "--length", "0"], "0 is not in the range x>=1"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["p2ptrain", *arguments])
    monkeypatch.setattr(gc, "freeze", lambda: None)  # it would last for all tests
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("p2ptrain: error: ")
    assert message in line


def test_a_simulation_that_cannot_be_written_prints_its_results_and_one_line() -> None:
    Path("out/table.csv").mkdir(parents=True)
    given = ["simulate", "--peers", "1", "--steps", "2", "--sync-every", "2", "--set", "batch_size=1", "--out", "out"]
    done = CliRunner().invoke(cli, given)
    assert "loss before" in done.stdout
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == "directory out cannot be used (Is a directory); give one that is writable"


@pytest.mark.processes
def test_a_terminal_that_lacks_a_character_shows_another_one() -> None:
    done = _run("estimate", "--params", "124M", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout


@pytest.mark.processes
def test_an_unknown_variable_is_a_mistake_too() -> None:
    done = _run("config", "show", P2PTRAIN_SYNC_EVRY="5")
    assert done.returncode == 2
    assert (
        done.stderr
        == "p2ptrain: error: unknown environment variable P2PTRAIN_SYNC_EVRY; did you mean P2PTRAIN_SYNC_EVERY?\n"
    )


def test_config_show_prints_value_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("peer.toml").write_text("lr = 0.1\nsteps = 5\n", encoding="utf-8")
    monkeypatch.setenv("P2PTRAIN_STEPS", "6")
    arguments = ("config", "show", "-c", "peer.toml", "--threads", "3")
    rows = {row.split()[0]: row.split()[1:] for row in _output(*arguments).splitlines()}
    assert rows["lr"] == ["0.1", "peer.toml:", "lr"]
    assert rows["steps"] == ["6", "P2PTRAIN_STEPS"]
    assert rows["threads"] == ["3", "--threads"]
    assert rows["eval_every"] == ["100", "model", "gpt-demo"]
    assert rows["muon_lr"] == ["unused", "default"]
    assert rows["context"] == ["the", "model's", "default"]
    merged = json.loads(_output(*arguments, "--json"))
    assert merged["lr"] == {"value": 0.1, "source": "peer.toml: lr"}
    assert merged.keys() == rows.keys() == SETTINGS.keys()
    presets = {row.split()[0]: row.split()[1:] for row in _output(*arguments, "--preset", "diloco").splitlines()}
    assert presets["sync_every"] == ["500", "preset", "diloco"]
    assert presets["lr"] == rows["lr"]
    assert presets["batch_tokens"] == ["65536", "model", "diloco-150m"]
    assert presets["eval_tokens"] == [str(16 * 65_536), "model", "diloco-150m"]


def test_join_trains_and_prints_its_line_whole(session: type[FakeNetworkSession]) -> None:
    text = _output("join", "--steps", "2", "--threads", "1", "--device", "cpu")
    assert "warning: the warm-up takes 50 of 2 steps: give" in text
    assert f"\np2ptrain join --initial-peers {MADDR}\n" in text
    assert "step 2/2 · loss " in text
    assert re.search(r"\n[\d,]+ parameters; a step is \d+ windows of \d+ tokens; evaluating on [\d,]+ held-out", text)
    assert re.fullmatch(
        r"finished at step 2: held-out \d\.\d{3} \(perplexity \d+\.\d\) after the last round, saved in "
        r"p2ptrain-p2ptrain; try: p2ptrain generate p2ptrain-p2ptrain",
        text.splitlines()[-1],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allow", "none"], "--allow 'none': No such file"),
        (["--deny", "none"], "--deny 'none': No such file"),
        (["--run-key", "none"], "--run-key none: no such file"),
        (["--initial-peers", "none"], "ticket or --initial-peers none: no such file, and not a ticket or an address"),
        (["--share-key"], "--share-key: has no meaning without a key"),
        (["--allow", "list", "--initial-peers", MADDR], "--allow list does not hold your initial peer Qm.*; add it"),
    ],
)
def test_join_checks_its_files_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    Path("list").write_text("# nobody\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "p2ptrain.training.join", None)
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(cli, ["join", *arguments], catch_exceptions=False)


def test_progress_is_one_line() -> None:
    progress = TrainingProgress(
        run_step=340, total_steps=0, round=1, peers=4, loss=2.71, eval_loss=2.8, bits_per_byte=4.04,
        tokens_per_s=5120.4, mfu=None, exchange=0.0123, left_s=None, sent=120, merged=118,
        skipped={"stale": 1, "epoch": 1},
    )  # fmt: skip
    assert format_progress(progress) == (
        "step 340 · loss 2.710, held-out 2.800 (perplexity 16.4, 4.04 bits a byte) · 5,120 tokens/s, 1.2 % exchange"
        " · peers 4 · round 1 · fragments 120 out, 118 in, 2 skipped"
    )
    ending = dataclasses.replace(progress, total_steps=2000, left_s=754.0, bits_per_byte=None)
    assert format_progress(ending).startswith(
        "step 340/2000, 13 min left · loss 2.710, held-out 2.800 (perplexity 16.4) · 5,120"
    )
    on_a_gpu = dataclasses.replace(progress, mfu=0.4123)
    assert "· 5,120 tokens/s, 41.2 % MFU, 1.2 % exchange ·" in format_progress(on_a_gpu)
    steps = PairSteps()
    steps.write("start", run=RunConfig().to_dict())
    assert steps.by_status is None
    steps.write("start", run=RunConfig(averaging="pairwise", outer_optimizer="sgdm").to_dict())
    for status in ("joined", "paired", "paired", "alone"):
        steps.write("pair", status=status)
    assert "· peers 4 · pairs 2, alone 1 · fragments 120 out" in format_progress(progress, steps.by_status)


def test_bootstrap_prints_and_writes_its_addresses(
    session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: os.kill(os.getpid(), 15))
    text = _output("bootstrap", "--write-addresses", "addresses")
    assert f"\np2ptrain join --initial-peers {MADDR}\n" in text
    assert text.endswith("stopped\n")
    assert MADDR in Path("addresses").read_text(encoding="utf-8")
    assert session.opened is not None
    assert session.opened.identity == "p2ptrain-bootstrap/identity.key"


def test_bootstrap_offers_no_setting_of_a_run_that_is_joined() -> None:
    text = _output("bootstrap", "--help")
    assert "--initial-peers" in text
    assert not [flag for flag in ("--run-key", "--founder", "--anchor") if flag in text]


def test_a_bootstrap_node_without_its_daemon_does_not_stay(session: type[FakeNetworkSession]) -> None:
    session.failure = ConfigError("the libp2p daemon (p2pd) died")
    result = CliRunner().invoke(cli, ["bootstrap"])
    assert isinstance(result.exception, ConfigError)
    assert "p2pd" in str(result.exception)


def test_peers_lists_the_members(session: type[FakeNetworkSession]) -> None:
    arguments = ("peers", "--initial-peers", MADDR)
    assert json.loads(_none_found(*arguments, "--json").stdout) == []
    assert _none_found(*arguments).stderr == "no peers found for run 'p2ptrain'\n"
    session.present = (FakeMember(), FakeMember(peer_id="QmThird", step=41))
    members = json.loads(_output(*arguments, "--json"))
    assert (members[1]["peer_id"], members[1]["maddrs"], members[1]["step"]) == ("QmThird", [MADDR], 41)
    title, *_, row, _ = _output(*arguments).splitlines()
    assert title.split() == ["run", "p2ptrain:", "2", "peers"]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["QmThird", "trainer", "training", "41", "2", "12.3", MADDR.rpartition("/p2p/")[0]]
    session.present = (FakeMember(round=-1),)
    assert _output(*arguments).splitlines()[-2].split("│")[5].strip() == "–"
    assert _output(*arguments).splitlines()[0].split() == ["run", "p2ptrain:", "1", "peer"]


def test_peers_says_what_it_waits_for(session: type[FakeNetworkSession], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: queue.Queue[str] = queue.Queue()
    logger = types.SimpleNamespace(info=lambda text, *values: lines.put(text % values))
    monkeypatch.setattr("p2ptrain.monitor.waiting.logger", logger)
    monkeypatch.setattr("p2ptrain.monitor.waiting.SAY_AFTER_S", 0.0)

    def members(self: FakeNetworkSession, run_id: str) -> list[FakeMember]:
        while not lines.get(timeout=30).startswith("asking the peers of run 'p2ptrain'"):
            pass
        return []

    monkeypatch.setattr(session, "members", members)
    _none_found("peers", "--initial-peers", MADDR)


def test_peers_shows_a_split_swarm(session: type[FakeNetworkSession]) -> None:
    joining = FakeMember(peer_id="QmThird", lineage="")
    session.present = (FakeMember(), FakeMember(peer_id="QmSame"), joining)
    arguments = ("peers", "--initial-peers", MADDR)
    assert "lineage" not in _output(*arguments)
    session.present = (FakeMember(), FakeMember(peer_id="QmSecond", lineage="1-[b]beef"), joining)
    _, _, titles, _, *rows, _, said = _output(*arguments).splitlines()
    column = [cell.strip() for cell in titles.strip("┃").split("┃")].index("lineage")
    lineages = [row.strip("│").split("│")[column].strip() for row in rows]
    assert lineages == ["0-00", "1-[b]beef", ""]
    assert said.startswith("2 lineages: the swarm is split. Peers of one lineage commit rounds with each other only.")


def test_peers_prints_which_links_are_relayed(session: type[FakeNetworkSession]) -> None:
    first, second = FakeMember(peer_id="QmB", relayed={"QmA": "QmRelay"}), FakeMember(peer_id="QmA")
    arguments = ("peers", "--initial-peers", MADDR)
    session.present = (first, second)
    assert _output(*arguments).splitlines()[-1] == "QmA and QmB: relayed through QmRelay"
    assert json.loads(_output(*arguments, "--json"))[0]["relayed"] == {"QmA": "QmRelay"}
    session.present = (first, dataclasses.replace(second, relayed={"QmB": "QmRelay"}))
    assert _output(*arguments).count("relayed through") == 1
    session.present = (dataclasses.replace(first, relayed={"QmA": ""}), second)
    said = "QmA and QmB: no direct TLS connection; libp2p carries rounds and state"
    assert _output(*arguments).splitlines()[-1] == said
    session.present = (second,)
    assert "QmA and QmB" not in _output(*arguments)


def test_peers_prints_who_struck_whom(session: type[FakeNetworkSession]) -> None:
    given = (Struck("QmEvil", 3, "broke the protocol: [bold]bad[/bold] Beat", 250.0), Struck("QmA", 1, "lied", 1.0))
    session.present = (FakeMember(), FakeMember(peer_id="QmThird", strikes=given))
    arguments = ("peers", "--initial-peers", MADDR)
    assert _output(*arguments).splitlines()[-3:] == [
        "strikes of the last ten minutes:",
        "QmA: 1 by QmThird, 0 min ago: lied",
        "QmEvil: 3 by QmThird, 4 min ago: broke the protocol: [bold]bad[/bold] Beat",
    ]
    members = json.loads(_output(*arguments, "--json"))
    assert [len(member["strikes"]) for member in members] == [0, 2]
    assert members[1]["strikes"][1] == {"peer_id": "QmA", "count": 1, "reason": "lied", "age_s": 1.0}
    session.present = (FakeMember(),)
    assert "strikes" not in _output(*arguments)


def test_what_other_peers_write_is_listed_as_text(session: type[FakeNetworkSession]) -> None:
    session.present = (FakeMember(role="[/x]", status="[bold]training[/bold]"),)
    listed = _output("peers", "--initial-peers", MADDR)
    assert "[/x]" in listed
    assert "[bold]training[/bold]" in listed


@pytest.mark.parametrize(
    "arguments", [["data", "prepare", "a", "--tokenizer", "bytes", "--out", "b", "--held-out"], ["generate", "--top-p"]]
)
@pytest.mark.parametrize("given", ["nan", "inf", "-0.1"])
def test_a_share_is_a_number_within_its_range(arguments: list[str], given: str) -> None:
    found = CliRunner().invoke(cli, [*arguments, given])
    assert found.exit_code == 2
    assert re.search(rf"Invalid value for '{arguments[-1]}': {given} is not (a number|in the range 0<)", found.output)


def test_generate_writes_text_after_the_prompt() -> None:
    model = build("gpt-demo", vocab_size=VOCAB_SIZE, seed=0)
    info = {"run": RunConfig(model="gpt-demo").to_dict()}
    checkpoint.save(Path("p2ptrain-p2ptrain"), checkpoint.Checkpoint(1, info, {"model": model.state_dict()}))
    text = _output("generate", "--prompt", "class ", "--length", "20")
    assert text.startswith("class ")
    assert len(text) == len("class ") + 20 + 1
    assert text == _output("generate", "--prompt", "class ", "--length", "20")
    assert text != _output("generate", "--prompt", "class ", "--length", "20", "--seed", "1")
