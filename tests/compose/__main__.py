"""`make compose-test`: the compose demo as a user runs it, checked from outside; prints a line for each thing done.

Builds the image, starts the swarm, scales it, kills a worker, cuts one off, kills the bootstrap node, stops all and
starts again. Takes about a quarter of an hour on two cores. The exit status is 0 where everything held, 1 where
something did not, 2 where there is no Docker.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator

from tests.compose.docker import COMPOSE_FILE, SERVICES, CheckFailedError, Demo, NoDockerError, find_compose
from tests.compose.records import Event, Worker, check_agreement, common_round, read_worker

WORKERS = 4
SCALED = 6
# What compose.yaml gives a container to stop. Docker kills it then, which its exit status shows.
GRACE_S = 20
LAST_LINES = 15


def main() -> int:
    try:
        compose = find_compose()
    except NoDockerError as error:
        print(f"compose-test: error: {error}", file=sys.stderr)
        return 2
    demo = Demo(compose)
    print(f"{' '.join(compose)} -f {COMPOSE_FILE.relative_to(COMPOSE_FILE.parents[1])}", flush=True)
    began_s = time.monotonic()
    try:
        demo.compose("down", "-v")  # what a run left that was killed
        count = _tell(demo)
    except CheckFailedError as error:
        print(f"FAILED after {time.monotonic() - began_s:.0f} s: {error}\n{_last_lines(demo)}", flush=True)
        return 1
    finally:
        with contextlib.suppress(CheckFailedError):
            demo.compose("down", "-v")
    print(f"passed: {count} checks in {time.monotonic() - began_s:.0f} s", flush=True)
    return 0


def _tell(demo: Demo) -> int:
    """Print what happens while it does. Returns the number of checks."""
    count, began_s = 0, time.monotonic()
    for line in story(demo):
        count += 1
        print(f"ok {time.monotonic() - began_s:6.1f} s  {line}", flush=True)
        began_s = time.monotonic()
    return count


def story(demo: Demo) -> Iterator[str]:
    """All that is done and checked, with a line after each check. Raises CheckFailedError."""
    demo.compose("build")
    yield f"built: {int(demo.docker('image', 'inspect', '--format', '{{.Size}}', 'p2ptrain')) / 1e6:.0f} MB"

    began_s = time.time()
    demo.compose("up", "-d")
    _until_healthy(demo, WORKERS)
    yield f"up: a bootstrap node, {WORKERS} workers and the page, all healthy"
    yield f"all workers: {_until_round(demo, WORKERS, began_s)}"
    _until_listed(demo)
    yield f"`p2ptrain peers` lists the {WORKERS} workers"
    _until_shown(demo)
    yield f"the page shows the {WORKERS} workers and their rounds, each with one hash"

    began_s = time.time()
    demo.compose("up", "-d", "--scale", f"worker={SCALED}")
    _until_healthy(demo, SCALED)
    yield f"scaled: {SCALED} workers, all healthy, each with an identity and a directory of its own"
    yield f"all workers: {_until_round(demo, SCALED, began_s)}"

    victim, began_s = _workers(demo)[1], time.time()
    demo.docker("kill", victim.container)
    yield f"{victim.container} killed; the others: {_until_round(demo, SCALED - 1, began_s)}"
    began_s = time.time()
    demo.docker("start", victim.container)
    _until_back(demo, victim)
    yield f"{victim.container} started: it has its identity, and continues from its checkpoint"
    yield f"all workers: {_until_round(demo, SCALED, began_s)}"

    lost, began_s = _workers(demo)[2], time.time()
    network = demo.network()
    demo.docker("network", "disconnect", network, lost.container)
    yield f"{lost.container} cut off; the others: {_until_round(demo, SCALED - 1, began_s, without=lost.container)}"
    began_s = time.time()
    demo.docker("network", "connect", network, lost.container)
    yield f"{lost.container} connected again; all workers: {_until_round(demo, SCALED, began_s)}"

    (bootstrap,) = demo.containers("bootstrap")
    began_s = time.time()
    demo.docker("kill", bootstrap)
    yield f"{bootstrap} killed; all workers: {_until_round(demo, SCALED, began_s)}"
    demo.docker("start", bootstrap)
    _until_healthy(demo, SCALED)
    _until_listed(demo)
    yield f"{bootstrap} started: `p2ptrain peers` lists the {SCALED} workers through it"
    _until_shown(demo)
    yield f"the page shows the {SCALED} workers"

    before = _workers(demo)
    agreed = check_agreement(before)
    yield f"{agreed} rounds were recorded by two or more workers, each with one hash"

    took_s = _stop(demo)
    yield f"stopped in {took_s:.1f} s: every container within {GRACE_S} s, with exit status 0 and a checkpoint"

    began_s = time.time()
    demo.compose("down")
    demo.compose("up", "-d")
    _until_healthy(demo, WORKERS)
    _check_continued(before, _workers(demo))
    yield f"down, and up again: {WORKERS} workers continue with identities from before"
    yield f"all workers: {_until_round(demo, WORKERS, began_s)}"

    demo.compose("down", "-v")
    if left := demo.leftovers():
        raise CheckFailedError(f"`down -v` left {', '.join(left)}")
    yield "down -v: no container, network or volume is left"


# --- what is waited for -----------------------------------------------------------------------------------------------


def _workers(demo: Demo) -> list[Worker]:
    """The workers that run. Raises CheckFailedError when they disagree on a round, or share an identity."""
    workers = [read_worker(demo, container) for container in demo.containers("worker")]
    check_agreement(workers)
    return workers


def _until_healthy(demo: Demo, workers: int) -> None:
    def healthy() -> bool:
        containers = [container for service in SERVICES for container in demo.containers(service)]
        states = [demo.state(container)["Health"]["Status"] for container in containers]
        return states == ["healthy"] * (1 + workers + 1)

    demo.until(f"the bootstrap node, {workers} workers and the page are healthy", healthy)
    directories = {worker.directory for worker in _workers(demo)}
    if len(directories) != workers:
        raise CheckFailedError(f"{workers} workers in {len(directories)} directories: {sorted(directories)}")


def _until_round(demo: Demo, count: int, since_s: float, *, without: str = "") -> str:
    """Wait for a round that exactly these workers committed; returns what to say of it."""

    def committed() -> Event | None:
        workers = [worker for worker in _workers(demo) if worker.container != without]
        return common_round(workers, since_s) if len(workers) == count else None

    event = demo.until(f"a round of exactly these {count} workers", committed)
    return f"round {event['round']} of {event['group_size']}, state {event['state_hash'][:16]} on each"


def _until_listed(demo: Demo) -> None:
    """Wait until the command says that exactly the workers are in the run, asked through the bootstrap node."""
    workers = _workers(demo)

    def listed() -> bool:
        # Exit status 1: no peers, yet.
        script = "p2ptrain peers --json || test $? = 1"
        members = json.loads(demo.docker("exec", workers[0].container, "sh", "-c", script))
        return {member["peer_id"] for member in members} == {worker.peer_id for worker in workers}

    demo.until("`p2ptrain peers` lists the workers", listed)


def _until_shown(demo: Demo) -> None:
    """Wait until the page shows exactly the workers, and rounds of theirs that agree."""
    workers = {worker.peer_id for worker in _workers(demo)}

    def shown() -> bool:
        overview = demo.page("overview")
        training = {peer["id"] for peer in overview["peers"] if peer["kind"] == "training"}
        return training == workers and overview["agreed"] and overview["rounds"] > 0

    demo.until("the page shows the workers", shown)


def _until_back(demo: Demo, victim: Worker) -> None:
    """Wait until a worker that was started again says that it continues, as who it was."""
    says = f"continuing run 'compose' .* as peer {victim.peer_id}"
    demo.until(
        f"{victim.container} continues as {victim.peer_id}",
        lambda: re.search(says, demo.docker("logs", "--tail", "50", victim.container)),
    )


def _stop(demo: Demo) -> float:
    """Stop all; returns how long it took, in seconds."""
    began_s = time.monotonic()
    demo.compose("stop")
    took_s = time.monotonic() - began_s
    for service in SERVICES:
        for container in demo.containers(service, stopped=True):
            if status := demo.state(container)["ExitCode"]:
                raise CheckFailedError(f"{container} ended with exit status {status} (137: killed after {GRACE_S} s)")
            # The last line but for what is logged beside it.
            output = demo.docker("logs", "--tail", "10", container)
            if service == "worker" and not re.search(r"^interrupted at step \d+, saved in ", output, re.MULTILINE):
                raise CheckFailedError(f"{container} stopped without a checkpoint; its last lines: {output}")
    return took_s


def _check_continued(before: list[Worker], after: list[Worker]) -> None:
    strangers = {worker.peer_id for worker in after} - {worker.peer_id for worker in before}
    if strangers:
        raise CheckFailedError(f"started again, these are new: {sorted(strangers)}")


def _last_lines(demo: Demo) -> str:
    """The last lines of every container, for the message of a failure."""
    with contextlib.suppress(CheckFailedError):
        return demo.compose("logs", "--no-color", f"--tail={LAST_LINES}")
    return "(there are no logs)"


if __name__ == "__main__":
    sys.exit(main())
