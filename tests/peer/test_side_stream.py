"""The calls that `CudaSideStream` makes, in order, with a torch.cuda that only notes them: there may be no GPU here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from p2ptrain.peer.side_stream import CudaSideStream

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    class Event:
        done = False

        def query(self) -> bool:
            calls.append("query")
            return self.done

        def synchronize(self) -> None:
            calls.append("synchronize")

    class Stream:
        def __init__(self, device: torch.device) -> None:
            calls.append(f"stream of {device}")

        def wait_stream(self, stream: Training) -> None:
            calls.append(f"wait for {stream.name}")

        def record_event(self) -> Event:
            calls.append("record")
            return Event()

    class Training:
        name = "training"

        def wait_stream(self, stream: Stream) -> None:
            calls.append("training waits for the side stream")

        def wait_event(self, event: Event) -> None:
            calls.append("training waits")

    def current_stream(device: int) -> Training:
        assert device == DEVICE.index
        return Training()

    @contextlib.contextmanager
    def stream(side: Stream) -> Iterator[None]:
        calls.append("enter")
        yield
        calls.append("exit")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return calls


def test_work_waits_for_training_and_the_event_for_the_work(calls: list[str]) -> None:
    side = CudaSideStream(DEVICE)
    pending = side.run(lambda: calls.append("work"), reads=[], writes=[])
    assert calls == ["stream of cuda:1", "wait for training", "enter", "work", "record", "exit"]
    calls.clear()
    assert not pending.done
    assert calls == ["query"]  # and nothing that blocks
    pending.wait()
    assert calls == ["query", "query", "synchronize", "training waits"]
    calls.clear()
    pending.event.done = True  # type: ignore[attr-defined]
    pending.wait()
    assert calls == ["query", "training waits"]


def test_after_an_error_training_uses_no_memory_of_what_was_queued(calls: list[str]) -> None:
    def work() -> None:
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        CudaSideStream(DEVICE).run(work, reads=[], writes=[])
    assert calls[-1] == "training waits for the side stream"


@pytest.mark.parametrize(("needed", "has_room"), [(200, True), (350, True), (351, False)])
def test_room_is_what_training_leaves_at_its_peak(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, needed: int, has_room: bool
) -> None:
    """Of 1000 bytes others have 250, and training took 400 at most, of which it has given back some."""
    stats = SimpleNamespace(free=150, reserved=600, peak=400)

    def mem_get_info(device: int) -> tuple[int, int]:
        calls.append("driver")  # which may take milliseconds
        return stats.free, 1000

    def memory_stats(device: int) -> dict[str, dict[str, dict[str, int]]]:
        return {
            "reserved_bytes": {"all": {"current": stats.reserved}},
            "allocated_bytes": {"all": {"peak": stats.peak}},
        }

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", memory_stats)
    side = CudaSideStream(DEVICE)
    assert side.try_reserve(needed) == has_room
    stats.peak = 0  # torch.cuda.reset_peak_memory_stats()
    assert side.try_reserve(needed) == has_room
    assert calls.count("driver") == (0 if needed == 200 else 2)


def test_room_is_asked_for_once_a_second_and_counted_down_until_then(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, spare = [100.0], [500]

    def memory_stats(device: int) -> dict[str, dict[str, dict[str, int]]]:
        calls.append("torch")
        return {"reserved_bytes": {"all": {"current": spare[0]}}, "allocated_bytes": {"all": {"peak": 0}}}

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", memory_stats)
    monkeypatch.setattr("p2ptrain.peer.side_stream.time.monotonic", lambda: clock[0])
    side = CudaSideStream(DEVICE)
    assert [side.try_reserve(200), side.try_reserve(200)] == [True, True]
    assert calls.count("torch") == 1
    spare[0] = 100
    assert not side.try_reserve(200), "100 are left of what was said, so it is asked again"
    assert side.try_reserve(60)
    assert calls.count("torch") == 2
    spare[0], clock[0] = 50, 101.5
    assert not side.try_reserve(60)


def test_with_an_allocator_that_counts_nothing_there_is_no_room(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied then goes as on other devices."""

    def memory_stats(device: int) -> object:
        raise NotImplementedError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", memory_stats)
    assert not CudaSideStream(DEVICE).try_reserve(1)


def test_host_memory_that_cannot_be_pinned_is_used_as_it_is(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pin_memory(values: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    empty = torch.empty

    def limited(*shape: int, pin_memory: bool = False, **how: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **how).fill_(7.0)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", limited)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    side, values = CudaSideStream(DEVICE), torch.ones(2)
    memory = side.host(3, 64)
    assert side.pin(values) is values
    assert caplog.text.count("host memory cannot be pinned (CUDA error: out of memory)") == 1
    assert (memory.shape, memory.dtype, memory.device.type) == ((3, 64), torch.float32, "cpu")
    assert not memory.any()  # written to, so that its pages are allocated
