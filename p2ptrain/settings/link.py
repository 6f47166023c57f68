"""The link and the swarm for which `p2ptrain estimate` computes the costs of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from p2ptrain.errors import ConfigError
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.setting import check_settings, count, number, setting, settings_of, shortened

UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
# A smaller number lacks its unit: 124 for 124M.
MIN_PARAMS, MAX_PARAMS = 10**3, 10**12
# Bytes a second of a rate in Mbit/s.
BYTES_PER_MBIT = 125_000
RATE = number("between 0.01 and 1000000", lambda mbit: 0.01 <= mbit <= 1e6, example=100)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The user's link and swarm, as the flags of `p2ptrain estimate` give them."""

    # fmt: off
    rate_mbit: float = setting(100.0, RATE, name="rate", metavar="MBIT",
        help="Rate of your link in Mbit/s, down and (without --rate-up) up.",
        why="A usual line of a home or a small server.")
    rate_up_mbit: float | None = setting(None, RATE, name="rate_up", metavar="MBIT", default_text="as --rate",
        help="Rate up in Mbit/s, if it differs.")
    rtt_ms: float = setting(60.0, number("between 0 and 60000", lambda ms: 0 <= ms <= 60_000, example=60),
        name="rtt", metavar="MS",
        help="Round trip between two peers in milliseconds, as ping shows it.",
        why="Within a continent; 100 to 200 between continents.")
    peers: int = setting(8, number("from 2 to 1000 (larger swarms were never tried)", lambda k: 2 <= k <= 1000),
        metavar="K",
        help="Number of peers in the run, with yours.",
        why="As p2ptrain simulate.")
    step_ms: float = setting(1000.0, number("between 0.001 and 1000000", lambda ms: 1e-3 <= ms <= 1e6, example=200),
        metavar="MS",
        help="Milliseconds of an inner step.",
        why="A guess, for 124M parameters on one GPU (docs/use/choosing.md). `p2ptrain peers` shows a run's own.")
    cores: int = setting(8, count(1),
        help="Cores of each machine; gossip may take --gossip-budget of them.",
        why="A usual machine with a GPU has as many or more (guess).")
    # fmt: on
    gossip_budget: float = NetworkConfig.gossip_budget

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def down_bytes_s(self) -> float:
        return self.rate_mbit * BYTES_PER_MBIT

    @property
    def up_bytes_s(self) -> float:
        return (self.rate_up_mbit or self.rate_mbit) * BYTES_PER_MBIT

    @property
    def rtt_s(self) -> float:
        return self.rtt_ms / 1e3

    @property
    def step_s(self) -> float:
        return self.step_ms / 1e3


LINK_SETTINGS = tuple(settings_of(Link))


def parse_params(text: str, origin: str) -> int:
    """The number in "124M", "1.5B", "10.8M", "110464". Raises ConfigError naming `origin`."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kMB]?)", text.replace(",", ""), re.ASCII)
    params = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not MIN_PARAMS <= params <= MAX_PARAMS:
        raise ConfigError(
            f"{origin}: {shortened(text)} must be a number of parameters from 1k to 1000B, such as 124M or 1.5B"
        )
    return params
