"""The compose demo from outside: the commands that a user types, and what Docker says about the containers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SERVICES = ("bootstrap", "worker", "dashboard")
COMPOSE_FILE = Path(__file__).parents[2] / "peers" / "compose.yaml"
# Not the name that Compose would choose, so that a demo which is running on this machine is left alone.
PROJECT = "p2ptrain-compose-test"
# Only a hang lasts as long, on a busy machine too.
DEADLINE_S = 400.0
# Torch comes over the network into the first build.
COMMAND_TIMEOUT_S = 3600.0
PAGE_TIMEOUT_S = 60.0
POLL_S = 2.0


class NoDockerError(Exception):
    """There is nothing here to run containers with; says what is missing."""


class CheckFailedError(Exception):
    """Something is not as it is promised."""


def find_compose() -> list[str]:
    """How Compose is called here: version 2 as `docker compose`, version 1 as `docker-compose`.

    Raises:
        NoDockerError: it is not here, or no Docker engine answers.
    """
    if shutil.which("docker") is None:
        raise NoDockerError("there is no `docker` on this machine; install Docker, and try again")
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True)
    if engine.returncode:
        reason = (engine.stderr.strip() or "no answer").splitlines()[-1]
        raise NoDockerError(f"no Docker engine can be used here ({reason}); start it, or get the right to use it")
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    raise NoDockerError("neither `docker compose` nor `docker-compose` works here; install one of them")


class Demo:
    """The containers of `peers/compose.yaml`, in a project of their own.

    Args:
        compose: how Compose is called here.
    """

    def __init__(self, compose: Sequence[str]) -> None:
        self._compose = [*compose, "-p", PROJECT, "-f", str(COMPOSE_FILE)]
        # Any port of this machine that is free.
        self._environ = {**os.environ, "DASHBOARD_PORT": "0"}

    def compose(self, *arguments: str) -> str:
        """Run a command of Compose; returns what it prints. Raises CheckFailedError when it fails."""
        return _run([*self._compose, *arguments], self._environ)

    def docker(self, *arguments: str) -> str:
        """Run a command of Docker; returns what it prints. Raises CheckFailedError when it fails."""
        return _run(["docker", *arguments], self._environ).strip()

    def containers(self, service: str, *, stopped: bool = False) -> list[str]:
        """Names of a service's containers that run, or of all that there are, oldest number first."""
        found = self.docker(
            "ps", *(["--all"] if stopped else []), "--format", "{{.Names}}",
            "--filter", f"label=com.docker.compose.project={PROJECT}",
            "--filter", f"label=com.docker.compose.service={service}",
        ).splitlines()  # fmt: skip
        return sorted(found, key=lambda name: int("".join(filter(str.isdigit, name)) or 0))

    def state(self, container: str) -> dict[str, Any]:
        """Docker's account of a container: Status, ExitCode, Health …"""
        state: dict[str, Any] = json.loads(self.docker("inspect", "--format", "{{json .State}}", container))
        return state

    def page(self, name: str) -> dict[str, Any]:
        """The newest of what the page in the browser is told under a name: "run", "overview" …"""
        (container,) = self.containers("dashboard")
        address = self.docker("port", container, "8080/tcp").splitlines()[0]
        # The page prints its address with a token, which a new container changes.
        shown = re.findall(r"is shown at http://\S*/\?(token=\S+)", self.docker("logs", container))
        if not shown:
            raise CheckFailedError("the page has not printed its address with a token")
        try:
            with urllib.request.urlopen(f"http://{address}/api/state?{shown[-1]}", timeout=PAGE_TIMEOUT_S) as stream:
                for line in stream:
                    if line == f"event: {name}\n".encode():
                        told: dict[str, Any] = json.loads(stream.readline().removeprefix(b"data: "))
                        return told
        except OSError as error:
            raise CheckFailedError(f"the page at {address} cannot be read: {error}") from error
        raise CheckFailedError(f"the page at {address} ends without any {name}")

    def leftovers(self) -> list[str]:
        """Every container, network and volume of the project, with its kind before the name."""
        label = ("--filter", f"label=com.docker.compose.project={PROJECT}")
        return [
            f"{kind} {name}"
            for kind, command, field in (
                ("container", ("ps", "--all"), "Names"),
                ("network", ("network", "ls"), "Name"),
                ("volume", ("volume", "ls"), "Name"),
            )
            for name in self.docker(*command, *label, "--format", f"{{{{.{field}}}}}").splitlines()
        ]

    def network(self) -> str:
        """Name of the network that all containers are in."""
        (name,) = (name for name in self.leftovers() if name.startswith("network "))
        return name.partition(" ")[2]

    def until(self, what: str, condition: Callable[[], T | None]) -> T:
        """Poll until the condition is true, and return its value.

        Raises:
            CheckFailedError: it is not within the deadline, or a container has ended by itself. `what` says what was
                waited for.
        """
        deadline_s = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            self._check_none_failed(what)
            if time.monotonic() > deadline_s:
                raise CheckFailedError(f"{what}: not within {DEADLINE_S:.0f} s")
            time.sleep(POLL_S)
        return value

    def _check_none_failed(self, what: str) -> None:
        for container in (name for service in SERVICES for name in self.containers(service, stopped=True)):
            state = self.state(container)
            # 137: killed, by us.
            if state["Status"] == "exited" and state["ExitCode"] != 137:
                raise CheckFailedError(f"{what}: {container} ended with exit status {state['ExitCode']}")


def _run(command: Sequence[str], environ: dict[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if done.returncode:
        output = "\n    ".join((done.stdout + done.stderr).splitlines()[-15:])
        raise CheckFailedError(f"exit status {done.returncode} of {' '.join(command)}\n    {output}")
    return done.stdout
