"""Checks that the packages of an extra (`pip install 'p2ptrain[NAME]'`) are installed."""

from __future__ import annotations

import importlib.util

from p2ptrain.errors import ConfigError

# Import names of the packages of each extra; setup.cfg lists them by their pip names.
EXTRAS = {
    "data": ("datasets", "pyarrow"),
    "dashboard": ("starlette", "uvicorn", "anyio", "prometheus_client"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "simulate": ("matplotlib", "sklearn", "threadpoolctl"),
}


def require_extra(extra: str, what: str) -> None:
    """Raises ConfigError, with the command that installs it, if an extra is missing. Imports nothing of it.

    `what` is the command or option that needs the extra, for the message.
    """
    missing = [package for package in EXTRAS[extra] if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}; install with: pip install 'p2ptrain[{extra}]'")
