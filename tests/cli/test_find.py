"""`p2ptrain find`, and what `p2ptrain join` does with the runs that it finds on the local network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2ptrain.cli import find as find_module
from p2ptrain.cli.main import cli
from p2ptrain.errors import ConfigError, TransientError
from p2ptrain.network import lan
from p2ptrain.network.lan import CLOSED, Announcement
from p2ptrain.settings.table import Settings, merge
from p2ptrain.settings.ticket import parse_ticket
from p2ptrain.training.known_peers import KNOWN_PEERS_FILE
from p2ptrain.training.output_dir import claim_out
from tests.network.test_lan import A, B

NOVELS = Announcement(
    run_id="novels", model="gpt-demo", parameters=110_464, peers=2, step=1200, founder=A, peer_id=A,
    addresses=(f"/ip4/192.168.1.5/tcp/4001/p2p/{A}",),
)  # fmt: skip
POEMS = dataclasses.replace(
    NOVELS, run_id="poems", founder=B, peer_id=B, addresses=(f"/ip4/192.168.1.6/tcp/4001/p2p/{B}",)
)
NODE = Announcement(run_id="poems", peer_id=B, addresses=POEMS.addresses)
NOVELS_LINE = "run 'novels': model gpt-demo, 110,464 parameters, 2 peers, step 1,200, at 192.168.1.5\n"


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[Announcement]:
    """What other machines announce."""
    present: list[Announcement] = []
    monkeypatch.setattr(lan, "hosts_of", lambda maddrs: [] if "127.0.0.1" in str(maddrs) else ["192.168.1.2"])
    monkeypatch.setattr(lan, "look", lambda hosts: list(present) if hosts else pytest.fail("looked nowhere"))
    monkeypatch.setattr(lan, "in_container", lambda: False)
    return present


class Terminal:
    """Both standard streams, for the question whether a person can be asked."""

    def isatty(self) -> bool:
        return True


def run(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(cli, arguments, input=typed)


def choose(monkeypatch: pytest.MonkeyPatch, typed: str | None = None, **flags: str) -> tuple[Settings, str]:
    """The settings of a peer with these flags at a terminal on which this is typed; and what it shows."""
    import click

    shown: list[Settings] = []

    @click.command()
    def command() -> None:
        with monkeypatch.context() as patch:
            if typed is not None:
                patch.setattr(find_module, "sys", type("sys", (), {"stdin": Terminal(), "stdout": Terminal()}))
            shown.append(find_module.choose_nearby(merge(flags, {})))

    result = CliRunner().invoke(command, input=typed or "", standalone_mode=False)
    if result.exception is not None:
        result.exception.add_note(result.output)
        raise result.exception
    return shown[0], result.output


def joined(settings: Settings) -> tuple[object, ...]:
    """The run that these settings join, and through whom."""
    return settings.values["run_id"], settings.values["founder"], settings.values["initial_peers"]


TO_NOVELS = ("novels", A, NOVELS.addresses)
TO_NONE = ("p2ptrain", "", ())


def test_find_lists_runs_with_a_ticket_for_each(network: list[Announcement]) -> None:
    network += [NOVELS, CLOSED, NODE]
    result = run("find")
    assert result.exit_code == 0
    first, command, second, _ = result.stdout.splitlines(keepends=True)
    assert first == NOVELS_LINE
    assert second == "run 'poems': a bootstrap node, at 192.168.1.6\n"
    ticket = parse_ticket(command.split()[-1])
    assert (ticket.run_id, ticket.founder, ticket.addresses) == TO_NOVELS
    assert result.stderr == "closed runs: 1 peer announced; ask their owners for a ticket\n"


def test_find_as_json(network: list[Announcement]) -> None:
    network.append(NOVELS)
    (row,) = json.loads(run("find", "--json").stdout)
    assert parse_ticket(row.pop("ticket")).founder == A
    assert row == {
        "run_id": "novels", "model": "gpt-demo", "parameters": 110_464, "peers": 2, "step": 1200, "founder": A,
        "addresses": list(NOVELS.addresses),
    }  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_find_without_a_run_has_exit_status_1(network: list[Announcement], flags: list[str]) -> None:
    network.append(CLOSED)
    result = run("find", *flags)
    assert result.exit_code == 1
    assert result.stdout == ("[]\n" if flags else "")
    assert (
        "no open run found on the local network (runs in containers are announced only with --lan on)\n"
        in result.stderr
    )


def test_who_has_no_private_address_is_told_why_it_did_not_look(
    network: list[Announcement], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(monkeypatch, host_maddrs="/ip4/127.0.0.1/tcp/0")[1] == ""
    settings, said = choose(monkeypatch, host_maddrs="/ip4/127.0.0.1/tcp/0", lan="join")
    assert joined(settings) == TO_NONE
    assert said.startswith("--lan join: runs are not looked for, because this peer listens on no private address: 10.")
    monkeypatch.setattr(lan, "hosts_of", lambda maddrs: [])
    monkeypatch.setattr(lan, "look", lambda hosts: [])
    assert "(this machine has no private address: 10." in run("find").stderr


def test_a_command_of_find_names_no_code_of_the_announcer(network: list[Announcement]) -> None:
    network.append(dataclasses.replace(NOVELS, model="os:abort"))
    assert "--model" not in run("find").stdout


@pytest.mark.parametrize(
    ("typed", "joins"), [("\n", TO_NOVELS), ("y\n", TO_NOVELS), ("n\n", TO_NONE)], ids=["enter", "yes", "no"]
)
def test_one_run_is_shown_and_asked_about(
    network: list[Announcement], monkeypatch: pytest.MonkeyPatch, typed: str, joins: tuple[object, ...]
) -> None:
    network.append(NOVELS)
    settings, output = choose(monkeypatch, typed)
    assert joined(settings) == joins
    assert f"found on the local network:\n  {NOVELS_LINE}Join it? [Y/n]: " in output


@pytest.mark.parametrize(("typed", "joins"), [("1\n", TO_NOVELS), ("7\n0\n", TO_NONE)], ids=["first", "none"])
def test_several_runs_are_a_numbered_list(
    network: list[Announcement], monkeypatch: pytest.MonkeyPatch, typed: str, joins: tuple[object, ...]
) -> None:
    network += [POEMS, NOVELS]
    settings, output = choose(monkeypatch, typed)
    assert joined(settings) == joins
    assert f"  1  {NOVELS_LINE}  2  run 'poems': " in output
    assert "Join which one (0 to 2): " in output


def test_only_runs_of_the_given_name_and_founder_are_offered(
    network: list[Announcement], monkeypatch: pytest.MonkeyPatch
) -> None:
    network += [POEMS, NOVELS, dataclasses.replace(NOVELS, founder=B, peer_id=B, addresses=POEMS.addresses)]
    settings, output = choose(monkeypatch, "y\n", run_id="novels", founder=A)
    assert joined(settings) == TO_NOVELS
    assert "poems" not in output
    settings, _ = choose(monkeypatch, "", run_id="letters")
    assert settings.values["initial_peers"] == ()


def test_without_a_terminal_a_run_is_started_only_if_none_is_found(
    network: list[Announcement], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, output = choose(monkeypatch)
    assert joined(settings) == TO_NONE
    assert output.endswith("no run found there; starting one\n")
    network.append(NOVELS)
    with pytest.raises(TransientError, match=r"join it with p2ptrain join --lan join, or start another") as one:
        choose(monkeypatch)
    assert NOVELS_LINE in one.value.__notes__[0]
    network.append(POEMS)
    for flags in ({}, {"lan": "join"}):
        with pytest.raises(TransientError, match=r"2 runs were found .* p2ptrain join TICKET, or start another") as two:
            choose(monkeypatch, **flags)
        assert two.value.__notes__[0].count("    p2ptrain join p2pt1") == 2


def test_lan_join_joins_without_a_question(network: list[Announcement], monkeypatch: pytest.MonkeyPatch) -> None:
    network.append(NOVELS)
    settings, output = choose(monkeypatch, lan="join")
    assert joined(settings) == TO_NOVELS
    assert output.endswith(f"joining {NOVELS_LINE}")


@pytest.mark.parametrize("flags", [{"lan": "off"}, {"host_maddrs": ("/ip4/127.0.0.1/tcp/0",)}], ids=str)
def test_a_peer_that_is_not_on_the_local_network_does_not_look(
    network: list[Announcement], monkeypatch: pytest.MonkeyPatch, flags: dict[str, str]
) -> None:
    network.append(NOVELS)
    settings, output = choose(monkeypatch, **flags)
    assert (joined(settings), output) == (TO_NONE, "")


def test_in_a_container_it_says_that_it_does_not_look(
    network: list[Announcement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lan, "in_container", lambda: True)
    monkeypatch.setattr(lan, "look", lambda hosts: pytest.fail("looked"))
    chosen, said = choose(monkeypatch)
    assert said.startswith("this seems to be a container: runs on the local network are not looked for")
    assert not chosen.network_config().initial_peers
    assert choose(monkeypatch, host_maddrs="/ip4/127.0.0.1/tcp/0")[1] == ""


@pytest.mark.parametrize("left", ["checkpoint-7", KNOWN_PEERS_FILE])
def test_a_saved_run_goes_on_without_a_question(
    network: list[Announcement], monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    network.append(NOVELS)
    out = Path("p2ptrain-p2ptrain")
    (out / left).mkdir(parents=True)
    settings, output = choose(monkeypatch)
    assert (joined(settings), output) == (TO_NONE, "")
    # But what a peer that runs on this machine has saved is not this one's.
    with claim_out(None, "p2ptrain", joins=False):
        settings, _ = choose(monkeypatch, "y\n")
    assert joined(settings) == TO_NOVELS


def test_new_starts_a_run_without_looking(network: list[Announcement], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.cli.join.choose_nearby", lambda *given: pytest.fail("looked"))
    monkeypatch.setattr(
        "p2ptrain.training.join.join_run", lambda settings, source, device, **given: print(joined(settings))
    )
    assert run("join", "--new", "--plain").stdout == f"{TO_NONE}\n"
    result = run("join", "--new", *("--initial-peers", NOVELS.addresses[0]))
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("--new: has no meaning with a ticket or --initial-peers")


def test_a_run_that_is_found_is_refused_where_the_allow_list_lacks_its_peer(network: list[Announcement]) -> None:
    network.append(NOVELS)
    Path("friends.txt").write_text(f"{B}\n", encoding="utf-8")
    result = run("join", "--allow", "friends.txt", "--lan", "join")
    assert isinstance(result.exception, ConfigError)
    assert f"friends.txt does not hold your initial peer {A}" in str(result.exception)
