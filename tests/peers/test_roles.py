"""The settings files of `peers/`, one for each role: they load, work where they are meant to, and say why."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hivemind.utils.multiaddr import Multiaddr

from p2ptrain.errors import ConfigError
from p2ptrain.network.addresses import check_announce_maddrs
from p2ptrain.settings.table import NETWORK_SETTINGS, RUN_SETTINGS, Settings, merge

PEERS = Path(__file__).parents[2] / "peers"
ROLES = ("bootstrap", "datacentre", "gpu", "home", "worker")
# They join a run, and must not contradict it.
JOINERS = ("datacentre", "gpu", "home")


def _role(name: str) -> Settings:
    return merge({}, {}, str(PEERS / f"{name}.toml"))


def test_there_is_a_file_for_each_role() -> None:
    assert sorted(file.stem for file in PEERS.glob("*.toml")) == sorted(ROLES)


@pytest.mark.parametrize("name", ROLES)
def test_the_settings_of_a_role_load(name: str) -> None:
    settings = _role(name)
    assert any(settings.explicit(setting) for setting in settings.values)
    # The port may be taken where the tests run; the address must be well formed.
    assert all(Multiaddr(maddr) for maddr in settings.values["host_maddrs"])  # type: ignore[union-attr]
    settings.resolve_run(None)
    # What is to be filled in is left out, so the file works as it is.
    settings.network_config()


@pytest.mark.parametrize("name", ROLES)
def test_no_setting_of_a_role_is_misspelt(name: str, tmp_path: Path) -> None:
    misspelt = tmp_path / "misspelt.toml"
    text = (PEERS / f"{name}.toml").read_text(encoding="utf-8")
    for key in re.findall(r"^(\w+) = ", text, re.MULTILINE):
        misspelt.write_text(text.replace(f"\n{key} = ", f"\n{key}_ = "), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"unknown key '{key}_'"):
            merge({}, {}, str(misspelt))


@pytest.mark.parametrize("name", ROLES)
def test_what_a_role_suggests_to_fill_in_loads_too(name: str, tmp_path: Path) -> None:
    text = (PEERS / f"{name}.toml").read_text(encoding="utf-8")
    filled_in = tmp_path / "filled-in.toml"
    filled_in.write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE), encoding="utf-8")
    settings = merge({}, {}, str(filled_in))
    check_announce_maddrs(settings.values["announce_maddrs"])  # type: ignore[arg-type]
    assert settings.explicit("announce_maddrs") == (name in ("bootstrap", "datacentre", "home"))


@pytest.mark.parametrize("name", ROLES)
def test_every_value_of_a_role_has_its_reason_above_it(name: str) -> None:
    lines = (PEERS / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"\w+ = ", line):
            # Two settings may share a reason.
            assert above.startswith("# ") or re.match(r"\w+ = ", above), line


@pytest.mark.parametrize("name", JOINERS)
def test_who_joins_leaves_the_run_as_it_is(name: str) -> None:
    assert not any(_role(name).explicit(setting.name) for setting in RUN_SETTINGS)


def test_a_peer_that_others_dial_has_a_port_that_stays() -> None:
    for name in ROLES:
        (maddr,) = _role(name).values["host_maddrs"]  # type: ignore[misc]
        assert maddr.endswith("/tcp/4001") == (name in ("bootstrap", "datacentre", "home"))


def test_a_bootstrap_node_is_given_nothing_that_it_does_not_read() -> None:
    read = {setting.name for setting in NETWORK_SETTINGS} | {"run_id"}
    settings = _role("bootstrap")
    assert {name for name in settings.values if settings.explicit(name)} <= read
