"""Each test of this folder runs on a stand-in for a GPU, and on CUDA where torch finds a GPU."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.peer.side_stream import CudaSideStream, SideStream
from tests.side_stream import LateStream

NO_GPU = "torch finds no CUDA or ROCm GPU on this machine"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=needs_gpu)])
def side(request: pytest.FixtureRequest) -> SideStream:
    """A side stream and its device; on the stand-in, the work that was queued n-th is done after n % 3 polls."""
    if request.param == "cuda":
        return CudaSideStream(torch.device("cuda", torch.cuda.current_device()))
    polls = iter(range(10**6))
    return LateStream(lambda: next(polls) % 3)
