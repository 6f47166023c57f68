"""A joiner gets the run's tokenizer file from the members, whatever some of them answer."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import pytest
import trio

from p2ptrain.protocol.membership.lookup import MAX_TOKENIZER_BYTES, PIECE_BYTES, ask_tokenizer, tokenizer_piece
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.run_key import SECRET_BYTES, RunKey
from tests.protocol.swarm import RUN, Shapes, Swarm, run_virtual, swarm

SMALL: Shapes = [("weight", (70, 64))]
FILE = random.Random(3).randbytes(2 * PIECE_BYTES + 5)


def _run(file: bytes = FILE) -> RunConfig:
    return dataclasses.replace(RUN, tokenizer=hashlib.sha256(file).hexdigest(), vocab_size=300)


async def _ask(s: Swarm, *, seed: int = 0, key: RunKey | None = None) -> bytes | None:
    closed = None if key is None else ClosedRun(key, "test", random.Random(5).randbytes)
    return await ask_tokenizer(
        s.network.transport("joiner"), s.network.directory("joiner"), "test", s.run.tokenizer,
        rng=random.Random(seed), closed=closed,
    )  # fmt: skip


async def _start(s: Swarm, files: dict[str, bytes], key: RunKey | None = None) -> None:
    for number, (name, file) in enumerate(files.items()):
        s.start(name, founder=number == 0, tokenizer=file, key=key)
    await trio.sleep(10)


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, MAX_TOKENIZER_BYTES])
def test_a_file_of_any_size_arrives_whole(size: int) -> None:
    file = random.Random(size).randbytes(size)

    async def main() -> None:
        async with swarm(_run(file), shapes=SMALL) as s:
            await _start(s, {"m1": file})
            assert await _ask(s) == file

    run_virtual(main)


@pytest.mark.parametrize("seed", range(4))
def test_members_without_it_or_with_another_one_are_passed_over(seed: int) -> None:
    async def main() -> None:
        async with swarm(_run(), shapes=SMALL) as s:
            await _start(s, {"m1": b"", "m2": b"another file", "m3": FILE, "m4": b""})
            assert await _ask(s, seed=seed) == FILE

    run_virtual(main)


def test_a_member_that_sends_without_end_or_stops_is_left_for_another() -> None:
    """Pieces are counted, and what is not the file is thrown away."""

    async def main() -> None:
        async with swarm(_run(), shapes=SMALL) as s:
            await _start(s, {"m1": bytes(3 * MAX_TOKENIZER_BYTES), "m2": FILE, "m3": FILE})
            s.network.crash("m3")
            for seed in range(3):
                assert await _ask(s, seed=seed) == FILE

    run_virtual(main)


def test_no_tokenizer_is_found_if_no_member_has_it() -> None:
    async def main() -> None:
        async with swarm(_run(), shapes=SMALL) as s:
            assert await _ask(s) is None
            await _start(s, {"m1": b"", "m2": b"another"})
            assert await _ask(s) is None

    run_virtual(main)


def test_a_closed_run_gives_it_to_who_has_the_key_only() -> None:
    async def main() -> None:
        async with swarm(_run(), shapes=SMALL) as s:
            key = RunKey(bytes(SECRET_BYTES))
            await _start(s, {"m1": FILE, "m2": FILE}, key)
            assert await _ask(s, key=key) == FILE
            assert await _ask(s) is None

    run_virtual(main)


def test_pieces_are_those_of_the_file() -> None:
    assert b"".join(tokenizer_piece(FILE, n) or b"" for n in range(3)) == FILE
    assert tokenizer_piece(FILE, 3) is None
    assert tokenizer_piece(FILE, -1) is None
    assert tokenizer_piece(b"", 0) is None
