"""Simulated swarms: deterministic, and affected by schedules and losses as real peers are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.simulation import variants
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.swarm import simulate
from p2ptrain.simulation.variants import simulate_variants


def run(**settings: Any) -> Records:
    defaults = {"peers": 3, "steps": 40, "sync_every": 20, "eval_every": 20, "batch_size": 1}
    return simulate(Experiment.of(**{**defaults, **settings}))


def contributors(records: Records) -> list[set[str]]:
    return [set(event["contributors"]) for event in records.rounds]


SCRIPT = """
import sys
from pathlib import Path
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.swarm import simulate
simulate(Experiment.of(peers=3, steps=12, sync_every=4, eval_every=6, batch_size=1, loss=0.2, drop=0.2,
                       schedule=["5:crash:1", "7:join:3"])).write(Path(sys.argv[1]))
"""


@pytest.mark.processes
def test_the_same_seed_gives_the_same_records_byte_for_byte(tmp_path: Path) -> None:
    """Also with another hash seed and in another directory."""
    contents = []
    for number in ("1", "2"):
        out = tmp_path / f"somewhere-{number}"
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(out)], check=True, env={**os.environ, "PYTHONHASHSEED": number}
        )
        contents.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {*(f"peer-{i}.0.jsonl" for i in range(4)), "table.csv", "schedule.csv"}


def test_another_seed_is_another_run_and_the_callers_randomness_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = (run(steps=10, seed=seed) for seed in (1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert first.final_loss != second.final_loss


def test_a_run_learns_commits_every_round_and_ends_with_one_model() -> None:
    records = run(steps=80)
    assert [event["round"] for event in records.rounds] == [0, 1, 2, 3]
    assert contributors(records) == [{"peer-0", "peer-1", "peer-2"}] * 4
    table = records.table()
    assert [row["step"] for row in table] == [0, 20, 40, 60, 80]
    assert table[0]["correlation"] == pytest.approx(1)
    assert table[-1]["held_out_loss"] < table[0]["held_out_loss"] - 0.8
    assert records.final_loss < table[0]["held_out_loss"] - 0.8
    assert table[0]["bytes_sent"] == 0 < table[1]["bytes_sent"] < table[-1]["bytes_sent"] <= records.bytes_sent
    last = [event["anchor_hash"] for _, event in records.of("round") if event["round"] == 3]
    assert len(last) == 3
    assert len(set(last)) == 1


def test_gossip_keeps_peers_together() -> None:
    apart, together = (run(fragment_fraction=p, sync_every=40).correlations() for p in (0.0, 0.05))
    assert together[-1][1] > apart[-1][1]


def test_one_peer_takes_the_outer_step_alone() -> None:
    records = run(peers=1)
    assert [event["status"] for event in records.rounds] == ["solo", "solo"]


def test_who_crashes_is_left_out_and_who_joins_is_in() -> None:
    records = run(steps=100, schedule=["25:crash:2", "45:join:3", "70:leave:1"])
    first, *_, last = contributors(records)
    assert first == {"peer-0", "peer-1", "peer-2"}
    assert last == {"peer-0", "peer-3"}
    assert {"peer-0", "peer-1", "peer-3"} in contributors(records)
    reasons = Counter(event["reason"] for _, event in records.of("stop"))
    assert reasons == {"finished": 2, "left": 1}


def test_a_paused_peer_misses_rounds_and_comes_back() -> None:
    # For longer than others wait for a leader: it may be one.
    records = run(steps=200, schedule=["22:pause:1", "150:resume:1"])
    assert {"peer-0", "peer-2"} in contributors(records)
    assert contributors(records)[-1] == {"peer-0", "peer-1", "peer-2"}


def test_where_all_have_gone_the_run_waits_for_those_to_come() -> None:
    records = run(peers=1, schedule=["10:crash:0", "30:join:1"])
    assert [event["reason"] for event in records.events["peer-1.0"] if event["event"] == "stop"] == ["finished"]


@pytest.mark.long
def test_a_cut_off_peer_is_left_out_until_it_is_mended() -> None:
    records = run(steps=260, schedule=["22:cut:1", "90:mend:1"])
    assert {"peer-0", "peer-2"} in contributors(records)
    assert contributors(records)[-1] == {"peer-0", "peer-1", "peer-2"}
    assert records.goodput > 0.99


@pytest.mark.long
def test_a_narrow_link_makes_rounds_longer_for_as_long_as_it_is() -> None:
    records = run(steps=120, schedule=["1:narrow:1:0.5", "62:widen:1"])
    first, *_, last = records.rounds
    assert first["wall_s"] > last["wall_s"] + 0.5
    assert contributors(records)[-1] == {"peer-0", "peer-1", "peer-2"}


def test_who_has_finished_stays_for_a_peer_that_fetches_the_last_round() -> None:
    """Two of three peers contribute to it, and the link of the third is slow."""
    settings = {"steps": 4, "sync_every": 4, "fragment_fraction": 0.0, "seed": 1, "max_contributors": 2}
    drawn = run(**settings).rounds[-1]["contributors"]
    (left_out,) = {0, 1, 2} - {int(name.removeprefix("peer-")) for name in drawn}
    last = dict(run(**settings, schedule=[f"0:narrow:{left_out}:0.08"]).of("round"))
    assert [event["late"] for event in last.values()] == [peer == left_out for peer in range(3)]
    assert len({event["anchor_hash"] for event in last.values()}) == 1


def test_a_slow_peer_does_fewer_steps_and_no_peer_waits_for_it() -> None:
    records = run(steps=120, sync_every=20, speeds=[1.0, 1.0, 0.5])
    steps = Counter(peer for peer, _ in records.of("step"))
    assert steps["peer-2.0"] < 0.7 * steps["peer-0.0"]
    assert all(len(names) == 3 for names in contributors(records)[1:])


@pytest.mark.long
def test_dropped_outer_gradients_are_in_no_mean() -> None:
    records = run(steps=200, drop=0.4)
    counts = [len(names) for names in contributors(records)]
    # Where two of three were lost, the others were not READY for a mean of one.
    assert len(counts) >= 5
    assert min(counts) < 3
    late = [event for _, event in records.of("round") if event["late"]]
    assert late


def test_lost_fragments_are_counted() -> None:
    merged: Counter[str] = Counter()
    for _, event in run(loss=0.3).of("fragments"):
        merged.update({"merged": event["merged"], **event["skipped"]})
    assert 0.2 < merged["lost"] / (merged["merged"] + merged["lost"]) < 0.4


def test_a_slow_uplink_makes_rounds_longer_not_failing() -> None:
    quick, slow = run(), run(bandwidth_mbit=0.5)
    assert len(slow.rounds) == len(quick.rounds)
    assert slow.rounds[0]["wall_s"] > quick.rounds[0]["wall_s"] + 0.5


def test_settings_that_cannot_work_are_reported() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        run(data="/nowhere")
    with pytest.raises(ConfigError, match="unknown model"):
        run(model="gpt-huge")


INTERRUPTED = """
import os, sys
from p2ptrain.cli.main import main
from p2ptrain.simulation.swarm import _Simulation

_Simulation._apply = lambda self, event: os.kill(os.getpid(), event.step)
main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_swarm_ends_it_in_one_line(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["simulate", "--peers", "2", "--schedule", f"{number}:crash:1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (130, "p2ptrain: interrupted")


LONG = 'title = "Long"\npeers = 2\nsteps = 100000\n[[arm]]\nname = "a"\n[[arm]]\nname = "b"\n[[arm]]\nname = "c"\n'

# At a given moment, once, sends a signal to all processes, as a terminal does.
AT_A_MOMENT = """
import multiprocessing.popen_spawn_posix, os, sys
from concurrent.futures import ProcessPoolExecutor
from p2ptrain.cli.main import main
from p2ptrain.simulation import variants

def interrupting(owner, name, when, number):
    work = getattr(owner, name)

    def wrapped(*given, **named):
        if when == "before":
            os.killpg(0, number)
        result = work(*given, **named)
        if when == "after":
            os.killpg(0, number)
        setattr(owner, name, work)
        return result

    setattr(owner, name, wrapped)

os.cpu_count = lambda: 2
when, moment, number = sys.argv[1:4]
del sys.argv[1:4]
owner, name = {
    "the executor is made": (ProcessPoolExecutor, "__init__"),
    "an arm is submitted": (ProcessPoolExecutor, "submit"),
    "a process is spawned": (multiprocessing.popen_spawn_posix.Popen, "_launch"),
    "progress is awaited": (variants, "_tell_progress"),
}[moment]
interrupting(owner, name, when, int(number))
main()
"""


@contextmanager
def simulating(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that simulates long variants in its own session; all its processes are killed at the end."""
    arms = tmp_path / "arms.toml"
    arms.write_text(LONG)
    command = [sys.executable, *arguments, "simulate", str(arms), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def all_of(session: int) -> list[psutil.Process]:
    """The running processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    """The test's own time limit ends it."""
    while not condition():
        time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("when", "moment", "number"),
    [
        ("after", "the executor is made", signal.SIGINT),
        ("before", "a process is spawned", signal.SIGINT),
        ("after", "a process is spawned", signal.SIGINT),
        ("after", "a process is spawned", signal.SIGTERM),
        ("after", "an arm is submitted", signal.SIGINT),
        ("before", "progress is awaited", signal.SIGINT),
    ],
)
def test_ctrl_c_while_arms_start_ends_all_of_them(
    tmp_path: Path, when: str, moment: str, number: signal.Signals
) -> None:
    with simulating(tmp_path, "-c", AT_A_MOMENT, when, moment, str(int(number))) as process:
        _, output = process.communicate()
        assert (process.returncode, output.strip()) == (130, "p2ptrain: interrupted")
        wait_for(lambda: not all_of(process.pid))


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_command_ends_its_arms(tmp_path: Path, number: signal.Signals) -> None:
    with simulating(tmp_path, "-m", "p2ptrain") as process:
        # A process for each variant, limited by the cores, and multiprocessing's resource tracker.
        wait_for(lambda: len(all_of(process.pid)) >= min(4, 2 + (os.cpu_count() or 1)))
        assert process.poll() is None
        process.send_signal(number)
        _, output = process.communicate()
        if number == signal.SIGKILL:
            assert process.returncode == -number
        else:
            assert (process.returncode, output.strip()) == (130, "p2ptrain: interrupted")
        wait_for(lambda: not all_of(process.pid))


@pytest.mark.processes
def test_an_interrupt_out_of_the_executor_ends_what_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does in a user's program."""

    class Interrupted(ProcessPoolExecutor):
        submitted = 0

        def submit(self, *given: Any, **named: Any) -> Any:
            future = super().submit(*given, **named)
            self.submitted += 1
            if self.submitted == 2:
                raise KeyboardInterrupt
            return future

    before = multiprocessing.active_children()
    monkeypatch.setattr(variants, "ProcessPoolExecutor", Interrupted)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    long = Experiment.of(peers=2, steps=100_000)
    with pytest.raises(KeyboardInterrupt):
        simulate_variants([long, long])
    wait_for(lambda: multiprocessing.active_children() == before)


@pytest.mark.processes
def test_an_arm_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = multiprocessing.active_children()
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(ConfigError, match="no such file"):
        simulate_variants([Experiment.of(peers=2, steps=100_000), Experiment.of(data="/nowhere", steps=10)])
    wait_for(lambda: multiprocessing.active_children() == before)
