"""Checks that the packages of an extra (`pip install 'p2ptrain[NAME]'`) are installed."""

from __future__ import annotations

import importlib.util

from p2ptrain.errors import ConfigError

# Import names of the packages of each extra; setup.cfg lists them by their pip names.
EXTRAS = {
    "dashboard": ("starlette", "uvicorn", "anyio", "prometheus_client"),
    "simulate": ("matplotlib", "sklearn", "threadpoolctl"),
}


def require_extra(extra: str, what: str) -> None:
    """Check that an extra is installed, without importing it.

    Args:
        extra: a name in EXTRAS.
        what: the command or option that needs it, for the message.

    Raises:
        ConfigError: a package is missing; the message has the command that installs it.
    """
    missing = [package for package in EXTRAS[extra] if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}; install with: pip install 'p2ptrain[{extra}]'")
