"""What p2pd says when something fails, said again for the user: what was given, what is wrong, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from p2ptrain.errors import ConfigError, UnreachableError

# What p2pd says of an address that it could not dial, and what that means; the first that is found counts.
_DIAL_REASONS = (
    (r"peer id mismatch.* key matches (\w+)", r"another peer answers there, with the id \1"),
    (r"connection refused", "connection refused: nothing listens on that port"),
    (r"no such host|failed to resolve|no (good )?addresses", "the host name or address leads nowhere"),
    (r"unreachable|no route", "there is no route to that address"),
    (r"deadline exceeded|timeout|timed out", "no answer"),
    (r"failed to negotiate", "what answers there is not a libp2p peer"),
)


def explain_start_failure(last_lines: Iterable[str]) -> ConfigError:
    """The daemon printed these lines and ended. What users get wrong has been checked before."""
    output = "; ".join(last_lines) or "it ended without a word"
    return ConfigError(f"the libp2p daemon did not start: {output}")


def explain_start_timeout(timeout_s: float) -> ConfigError:
    """The daemon is there but has not said that it is ready."""
    return ConfigError(
        f"the libp2p daemon did not start within {timeout_s:g} s; the machine may be overloaded: "
        "raise startup_timeout_s, or run fewer programs"
    )


def explain_unreachable(failures: Mapping[str, str]) -> UnreachableError:
    """None of the initial peers could be dialled; by address, what p2pd said."""
    found = "; ".join(f"{maddr} ({explain_dial(message)})" for maddr, message in failures.items())
    return UnreachableError(
        f"no initial peer can be reached: {found}. Check that the peer is up, that the address and port are those "
        "that it printed, and that no firewall is between"
    )


def explain_dial(message: str) -> str:
    """Say in a few words why a peer could not be dialled."""
    for pattern, reason in _DIAL_REASONS:
        if match := re.search(pattern, message):
            return match.expand(reason)
    return message.strip().rpartition("\n")[2]
