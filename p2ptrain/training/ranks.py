"""The processes that train as one peer: this one, or all that torchrun started on this machine.

The training loop reads the same in both cases: with one process, each method returns what it was given. With several,
every method is collective: all ranks must call it, in the same order.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from p2ptrain.errors import ConfigError, PeerLostError, TransientError
from p2ptrain.peer.process_group import ProcessGroup
from p2ptrain.settings.torchrun import Launch
from p2ptrain.signals import ignore_signals

if TYPE_CHECKING:
    from p2ptrain.peer.group_peer import GroupPeer
    from p2ptrain.peer.model_layout import ModelParts
    from p2ptrain.peer.peer import Peer

# How long the other ranks wait for rank 0, which joins, downloads the model and writes checkpoints meanwhile. A process
# that ends is noticed at once, and torchrun then ends the others.
JOIN_TIMEOUT = datetime.timedelta(days=1)
# How long rank 0 waits for the others, and every rank in a step. The ranks of one machine start, read data and take
# steps at nearly the same speed. After this time a process counts as hanging, unless it is rank 0.
STEP_TIMEOUT = datetime.timedelta(minutes=10)
# torchrun notices that a process has ended, and so frees its number, within a tenth of a second.
GONE_TIMEOUT_S, GONE_POLL_S = 2.0, 0.05
# Part of gloo's error when another rank did not take part in a collective in time.
_TIMED_OUT = "Timed out"


class Ranks:
    """The ranks of one peer. Without a group there is one.

    Attributes:
        rank, size: number of this process, and number of processes.
        group: of all ranks; None if there is one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        # Gloo, also where GPUs train: what ranks tell each other is small, and lies in the CPU's memory.
        self._several = None if group is None else ProcessGroup(group, torch.device("cpu"))
        self._pids = [int(pid) for pid in self.gather(torch.tensor([os.getpid()]))]

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that is on the network, prints, and writes files."""
        return self.rank == 0

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over all ranks."""
        return list(numbers) if self._several is None else self._several.total(*numbers)

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return self.total(float(flag))[0] > 0

    def tell(self, message: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the message of rank 0, which consists of JSON values. Other ranks pass None."""
        return (message or {}) if self._several is None else self._several.tell(message or {})

    def copy(self, tensor: torch.Tensor) -> None:
        """Set the values of a tensor to those on rank 0."""
        if self._several is not None:
            self._several.copy(tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, on the CPU. They must have the same shape and dtype."""
        return [tensor] if self._several is None else self._several.gather(tensor)

    def once(self, error: ConfigError) -> BaseException:
        """The exception to raise for an error that all ranks have: only rank 0 reports it, the others end silently."""
        return error if self.is_first else SystemExit(0)

    def agreed(self, stop: Callable[[], bool]) -> tuple[Callable[[], bool], Callable[[], float]]:
        """Make `stop` true on all ranks when it is true on any, and return it with a clock that is the same on all.

        The clock is in seconds, and stands still between two calls of `stop`.
        """
        if self._several is None:
            return stop, time.monotonic
        now_s = 0.0

        def agreed_stop() -> bool:
            nonlocal now_s
            stops, now_s = self.total(float(stop()), time.monotonic() if self.is_first else 0.0)
            return stops > 0

        agreed_stop()
        return agreed_stop, lambda: now_s

    @contextmanager
    def lost_ranks_reported(self, *, first_speaks: bool = False) -> Iterator[None]:
        """If this block fails because a rank has ended, raise TransientError with the number of that rank.

        Only one rank raises it. The others wait until that one has ended, and then end silently.

        Args:
            first_speaks: whether rank 0 reports by itself why it ends, as it does before training.
        """
        try:
            yield
        except (RuntimeError, PeerLostError) as error:
            if self._several is None or isinstance(error, ConfigError):
                raise  # NotAllowedError is a PeerLostError too, and is about another machine
            ignore_signals()  # torchrun ends all processes when one has ended
            if not (lost := self._gone()):
                if _TIMED_OUT not in str(error) and not isinstance(error, dist.DistStoreError):
                    raise
                raise _hanging(f"one of the {self.size} processes of this peer has not answered") from error
            speaker = next(rank for rank in range(self.size) if rank not in lost)
            if speaker != self.rank or (first_speaks and 0 in lost):
                self._await_end(speaker)
                raise SystemExit(0) from error
            numbers = " and ".join(f"{rank} (process {self._pids[rank]})" for rank in lost)
            raise TransientError(
                f"rank {numbers} of the {self.size} processes of this peer has ended; unless it has said an error, "
                f"start them again with the same command, as torchrun --max-restarts 3 does: they continue from the "
                f"newest checkpoint"
            ) from error

    def _gone(self) -> list[int]:
        """Wait for a rank whose process has ended. Returns these ranks; none if all still run after GONE_TIMEOUT_S."""
        deadline_s = time.monotonic() + GONE_TIMEOUT_S
        while not (lost := [rank for rank, pid in enumerate(self._pids) if not _is_there(pid)]):
            if time.monotonic() > deadline_s:
                break
            time.sleep(GONE_POLL_S)
        return lost

    def _await_end(self, rank: int) -> None:
        while rank != self.rank and _is_there(self._pids[rank]):
            time.sleep(GONE_POLL_S)


def _hanging(what: str) -> TransientError:
    return TransientError(
        f"{what} within {STEP_TIMEOUT.total_seconds():g} s; start them again with the same command, as "
        f"torchrun --max-restarts 3 does: they continue from the newest checkpoint"
    )


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def open_ranks(launch: Launch) -> Iterator[Ranks]:
    """Connect the processes that torchrun has started; blocks until all are there. Nothing to do for one process.

    Raises TransientError on rank 0 if not all have started within STEP_TIMEOUT.
    """
    if launch.size == 1:
        yield Ranks()
        return
    # NCCL averages gradients on GPUs.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = STEP_TIMEOUT if launch.rank == 0 else JOIN_TIMEOUT
    try:
        store = _store(launch, os.environ, timeout)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size, timeout=timeout)
    except dist.DistStoreError as error:
        if launch.rank:
            raise
        raise _hanging(f"the {launch.size} processes of this peer have not all started") from error
    try:
        assert dist.group.WORLD is not None
        yield Ranks(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _store(launch: Launch, environ: Mapping[str, str], timeout: datetime.timedelta) -> Any:
    """The store of torchrun's agent, in which ranks find each other.

    The agent keeps its store when it restarts processes (pytorch issue 135712). Without a prefix for each start, a rank
    may find the address of one that has ended, and then waits for it for ever.
    """
    is_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    torch_distributed: Any = dist  # its stubs lack the stores
    store = torch_distributed.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        launch.size,
        is_master=launch.rank == 0 and not is_agents,
        timeout=timeout,
    )
    return torch_distributed.PrefixStore(f"p2ptrain/{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def join_ranks(
    model: nn.Module, ranks: Ranks, enter: Callable[[nn.Module | ModelParts], Peer] | None = None
) -> tuple[Peer | GroupPeer, Peer | None]:
    """All ranks: join a run as one peer. The weights and buffers of the others become those of rank 0.

    Args:
        model: of this rank.
        ranks: all of them.
        enter: joins the run with the model; called on rank 0, and left out on the others.

    Returns:
        The peer that all ranks form together; and on rank 0 the peer on the network, the same object with one process.

    Raises:
        ConfigError, TimeoutError: `enter` raised it on rank 0. The other ranks end silently.
    """
    if ranks.group is None:
        assert enter is not None
        peer = enter(model)
        return peer, peer
    from p2ptrain.peer.group_peer import GroupPeer  # imports hivemind, which is slow

    try:
        member = GroupPeer(model, ranks.group, enter, device=torch.device("cpu"))
    except (ConfigError, TimeoutError) as error:
        if ranks.is_first:
            raise
        raise SystemExit(0) from error  # rank 0 reports it
    return member, member.peer
