"""What comes with `pip install 'p2ptrain[NAME]'` only, and the line that installs it where it is missing."""

from __future__ import annotations

import importlib.util

from p2ptrain.errors import ConfigError

# Packages by extra, as they are imported; setup.cfg has the same by the names that pip knows.
EXTRAS = {
    "dashboard": ("starlette", "uvicorn", "anyio", "prometheus_client"),
    "simulate": ("matplotlib", "sklearn", "threadpoolctl"),
}


def require_extra(extra: str, what: str) -> None:
    """Check that an extra is installed, without importing anything of it.

    Args:
        extra: a name in EXTRAS.
        what: the command or option that needs it, for the message.

    Raises:
        ConfigError: a package of it is missing; the message has the line that installs it.
    """
    missing = [package for package in EXTRAS[extra] if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}; install with: pip install 'p2ptrain[{extra}]'")
