"""Random frames after a valid Hello, over links on the memory network: `make fuzz`, or `python -m tests.hostile.fuzz`.

Frames are packed messages that a peer might send, messages with one field at an extreme, lists of other types and
lengths, and any of these with their bytes or their prefix changed. Nothing but a WireError may come of them: no other
exception, no task that dies, no memory. Each `CHUNK` frames have a seed and a swarm of their own, so that a failure is
repeated by its seed alone. A finding is kept in `tests/hostile/corpus/`, which `make test` replays.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import psutil
import pytest
import trio

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.indexspace import IndexSpace
from p2ptrain.errors import WireError
from p2ptrain.protocol.links.frame_reader import FrameReader
from p2ptrain.protocol.wire.frames import WIRE_VERSION, encode_frame
from p2ptrain.protocol.wire.messages import (
    KIND_OF,
    KINDS,
    Answer,
    Contribution,
    Fragment,
    Head,
    Mean,
    PairOffer,
    PairWeights,
    Request,
    pack,
)
from tests.hostile.harness import NAMES, SHAPES, attacked, facts, forgive
from tests.hostile.values import BYTES, FLOATS, NUMBERS, TEXTS, Facts, an_extreme, plausible
from tests.protocol.swarm import run_virtual

CORPUS = Path(__file__).parent / "corpus"
CHUNK = 20_000
# Frames sent at once; those after one that is refused are not read, and not counted.
BATCH = 16
# Virtual seconds between two batches: the swarm has a round in about 200.
EVERY_S = 0.01
# With pairwise steps: peers accept offers in a part of each interval only.
EVERY_PAIRWISE_S = 0.1
# Of the swarm's model.
INT8, BLOCKS = codec("int8"), IndexSpace(SHAPES).num_blocks
# What memory may grow by in a whole run.
MOST_GROWTH_BYTES = 50_000_000
PREFIX = struct.Struct("!BBBxIIIQ")
# In a kept finding, in place of the lineage that it was sent to.
LINEAGE = b"\0lineage"


class Frames:
    """A seeded source of frames. With `pairwise`, half of the batches are those of a partner in a pairwise step."""

    def __init__(self, seed: int, *, pairwise: bool = False) -> None:
        self.rng = random.Random(seed)
        self._pairwise = pairwise
        self._last = b""

    def batch(self, known: Facts) -> list[bytes]:
        if self._pairwise and self.rng.random() < 0.5:
            return self.exchange(known)
        return [self.frame(known) for _ in range(self.rng.randint(1, BATCH))]

    def exchange(self, known: Facts) -> list[bytes]:
        """An offer and the weights of a partner; in two of three cases with one frame wrong, missing or repeated."""
        rng, number = self.rng, self.rng.randrange(3)
        frames = [encode_frame(PairOffer(known.head.lineage, number))]
        for start, blocks in ((0, BLOCKS), (BLOCKS, 16)):
            values = np.full((blocks, BLOCK), rng.choice((0.0, 1.0, 1e11, 1e13)), np.float32)
            frames.append(encode_frame(PairWeights(number, start), INT8.encode(values)))
        at, how = rng.randrange(3), rng.randrange(9)
        wrong = [self.changed(frames[at])], [self.frame(known)], [], [frames[at]] * 2, [frames[at], frames[at - 1]]
        wrong = *wrong, [encode_frame(PairWeights(number, rng.choice((0, 1, BLOCKS))), self.payload(known))]
        return frames if how >= len(wrong) else [*frames[:at], *wrong[how], *frames[at + 1 :]]

    def frame(self, known: Facts) -> bytes:
        """One frame: in about a third of all a message is well formed."""
        rng = self.rng
        kind = rng.choice(list(KIND_OF))
        message = plausible(kind, known, rng)
        if rng.random() < 0.5:
            message = an_extreme(kind, known, rng)
        how = rng.random()
        header = pack(message) if how < 0.7 else self.changed(pack(message))
        if 0.5 < how < 0.7:
            header = msgpack.packb(self._other(msgspec.msgpack.decode(header)), strict_types=False)
        payload = self.payload(known)
        if kind not in (Answer, Contribution, Fragment, Mean, PairWeights):
            payload = rng.choice((b"", b"", payload))
        frame = self._framed(KIND_OF[kind], header, payload)
        if how > 0.95:
            frame = self.changed(frame)
        self._last = frame
        return frame

    def payload(self, known: Facts) -> bytes:
        rng = self.rng
        choice = rng.randrange(6)
        if choice == 0:
            return self.changed(pack(plausible(Head, known, rng)))
        if choice == 1:
            return struct.pack("<f", rng.choice((0.0, 1e30, float("nan"), float("inf")))) * rng.randrange(40)
        return rng.randbytes(rng.choice((0, 1, 66, 66 * rng.randrange(45), 3000)))

    def changed(self, data: bytes) -> bytes:
        """Some of its bytes changed, left out, repeated, or taken from another frame."""
        rng, out = self.rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(out) + 1)
            change = rng.randrange(5)
            if change == 0 and at < len(out):
                out[at] = rng.choice((0, 0x7F, 0x80, 0xC0, 0xCB, 0xD3, 0xDD, 0xFF, rng.randrange(256)))
            elif change == 1:
                del out[at : at + rng.choice((1, 2, 9))]
            elif change == 2:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 9)))
            elif change == 3:
                out[at:at] = out[at : at + 16] * rng.choice((1, 3))
            else:
                out[at:] = self._last[at:]
        return bytes(out)

    def _other(self, value: Any, depth: int = 0) -> Any:
        """The same lists with one value of another type, left out, or repeated."""
        rng = self.rng
        if isinstance(value, list) and value and rng.random() < 0.9 and depth < 6:
            at, change = rng.randrange(len(value)), rng.randrange(8)
            if change == 0:
                return value[:at] + value[at + 1 :]
            if change == 1:
                return value[:at] + [value[at]] * rng.choice((2, 5000)) + value[at:]
            return [*value[:at], self._other(value[at], depth + 1), *value[at + 1 :]]
        other: Sequence[Any] = (
            None, True, [], {}, {"a": 1}, 2**64 - 1, float("nan"), float("inf"), -float("inf"), [[[[]]]], "é",
            *NUMBERS, *FLOATS, *TEXTS, *BYTES,
        )  # fmt: skip
        return rng.choice(other)

    def _framed(self, kind: int, header: bytes, payload: bytes) -> bytes:
        """With a prefix that is right, or has one wrong field."""
        rng = self.rng
        version, flags, raw, acked = WIRE_VERSION, rng.choice((0, 0, 0, 2)), len(payload), 0
        sizes = [len(header), len(payload)]
        match rng.randrange(40):
            case 0:
                version = rng.randrange(256)
            case 1:
                kind = rng.choice((0, 255, *KINDS))
            case 2:
                flags = rng.randrange(256)
            case 3:
                acked = rng.choice((1, 2**40, 2**64 - 1))
            case 4:
                raw = rng.choice((0, 1, 2**22, 2**32 - 1))
            case 5:
                sizes[rng.randrange(2)] = rng.choice((0, 1, 2**18 + 1, 2**22 + 1, 2**32 - 1))
        return PREFIX.pack(version, kind, flags, *sizes, raw, acked) + header + payload


class Count:
    """The frames of one sender that its victims have read: taken or refused."""

    def __init__(self, patch: pytest.MonkeyPatch, sender: str) -> None:
        self.taken = self.refused = 0
        read = FrameReader.frame

        async def frame(reader: FrameReader) -> Any:
            ours = reader._stream.remote == sender
            try:
                result = await read(reader)
            except WireError:
                self.refused += ours
                raise
            self.taken += ours
            return result

        patch.setattr(FrameReader, "frame", frame)

    @property
    def read(self) -> int:
        return self.taken + self.refused


def fuzz(seed: int, count: int) -> Count:
    """Send frames until the victims have read so many; fails on the first bug, and keeps what was sent before it."""
    pairwise = seed % 8 >= 4
    source = Frames(seed, pairwise=pairwise)
    with pytest.MonkeyPatch.context() as patch:
        counted = Count(patch, "x")

        async def main() -> None:
            scene = {"as_member": seed % 2 == 1, "before_rounds": seed % 4 >= 2, "pairwise": pairwise}
            async with attacked(**scene, seed=seed) as (s, liar, bugs):
                liar.serve = lambda request: answer(source, request, facts(s))
                turn = 0
                while counted.read < count:
                    assert counted.read * 100 >= turn, "hardly any frame is read"
                    turn += 1
                    batch = source.batch(facts(s))
                    await liar.send(NAMES[turn % len(NAMES)], b"".join(batch))
                    await trio.sleep(EVERY_PAIRWISE_S if pairwise else EVERY_S)
                    if bugs:
                        keep(batch, facts(s))
                        raise AssertionError(bugs[0])
                    forgive(s, liar)

        run_virtual(main, seed)
    return counted


def answer(source: Frames, request: Request, known: Facts) -> tuple[Answer, bytes]:
    """An answer to a request of a victim, with anything for its payload."""
    return Answer(request.request, source.rng.random() < 0.9, request.what), source.payload(known)


def keep(batch: Iterable[bytes], known: Facts) -> Path:
    """Write a finding into the corpus."""
    data = b"".join(batch).replace(known.head.lineage.encode(), LINEAGE)
    path = CORPUS / f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return path


def replay(seed: int = 0) -> int:
    """Send every finding to every victim. Returns how many there are."""
    findings = sorted(CORPUS.glob("*.bin"))

    async def main() -> None:
        async with attacked(as_member=seed % 2 == 1, seed=seed) as (s, liar, _):
            for path in findings:
                for name in NAMES:
                    frame = path.read_bytes().replace(LINEAGE, s.peers["a"].node.driver.head.lineage.encode())
                    data = bytes([WIRE_VERSION]) + frame[1:]  # a finding may be older than the version
                    await liar.send(name, data)
                    await trio.sleep(EVERY_S)
                    forgive(s, liar)

    run_virtual(main, seed)
    return len(findings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first chunk: where a run before this one stopped")
    arguments = parser.parse_args()
    process, began_s = psutil.Process(), time.monotonic()
    total = refused = 0
    sizes: list[int] = []
    seed = arguments.seed
    while total < arguments.frames:
        try:
            counted = fuzz(seed, min(CHUNK, arguments.frames - total))
        except BaseException:
            print(f"failed; again: make fuzz ARGS='--seed {seed} --frames {CHUNK}'", file=sys.stderr, flush=True)
            raise
        total, refused, seed = total + counted.read, refused + counted.refused, seed + 1
        sizes.append(process.memory_info().rss)
        rate = total / (time.monotonic() - began_s)
        print(
            f"{total:>9,} frames read, {refused / total:.0%} of them refused, {rate:,.0f} a second, "
            f"{sizes[-1] / 1e6:.0f} MB; next seed {seed}",
            flush=True,
        )
    # The allocator keeps more after one seed than after another (measured: 355 to 426 MB, again and again).
    grown = min(sizes[-10:]) - min(sizes[:10])
    print(f"no exception but WireError; {replay()} findings replayed; memory grew by {grown / 1e6:.0f} MB")
    if grown > MOST_GROWTH_BYTES:
        sys.exit(f"more than {MOST_GROWTH_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
