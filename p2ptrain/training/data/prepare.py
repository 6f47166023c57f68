"""`p2ptrain data prepare`: turns documents into shards of token ids, in several processes.

A unit (`documents.Unit`) becomes one shard of training text, and one of held-out text if any of its documents is held
out. A file notes the shards of each finished unit. After an interruption, the same command continues.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from filelock import FileLock, Timeout

from p2ptrain.errors import ConfigError
from p2ptrain.settings.files import write_whole
from p2ptrain.signals import interruptible
from p2ptrain.training.data.documents import Document, Unit, find_units, read_documents
from p2ptrain.training.data.meta import META_FILE, UNFINISHED, Meta, Shard, encoded
from p2ptrain.training.data.text import not_utf8_warning
from p2ptrain.training.data.token_files import too_few
from p2ptrain.training.data.tokenizer import Tokenizer, token_dtype
from p2ptrain.training.data.tokenizer_file import (
    TOKENIZER_FILE,
    find_tokenizer,
    read_tokenizer,
    train_tokenizer,
    trained_size,
)

JOB_FILE = "job.json"
LOCK_FILE = ".lock"
# Characters encoded at once. With the longest document, this bounds the memory of a process.
BATCH_CHARACTERS = 2**20
# A tokenizer is trained on the first of this many characters, spread over the units. More makes it hardly better.
TRAINED_ON_CHARACTERS = 64 * 2**20


@dataclass(frozen=True)
class Job:
    """The data to prepare, and how. Only an equal job continues an interrupted preparation."""

    sources: tuple[str, ...]
    units: tuple[Unit, ...]
    field: str
    split: str
    held_out: float
    tokenizer: str
    vocab_size: int
    name: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(asdict(self))).hexdigest()


class Done(msgspec.Struct, frozen=True):
    """The shards made from a unit.

    Attributes:
        empty: documents without text, and where the first one is.
        not_utf8: number of places that are not UTF-8.
    """

    shards: list[Shard]
    empty: int = 0
    first_empty: str = ""
    not_utf8: int = 0


@dataclass(frozen=True)
class Progress:
    """The units that are done, and their tokens."""

    units: int
    units_total: int
    tokens: int


@dataclass(frozen=True)
class Prepared:
    """The result. `empty`: documents without text, and where the first one is."""

    meta: Meta
    empty: int
    first_empty: str


def prepare(
    sources: tuple[str, ...],
    out: Path,
    *,
    tokenizer: str,
    field: str,
    split: str,
    held_out: float,
    jobs: int,
    say: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> Prepared:
    """Write the tokens of all documents into `out`, or go on where an equal command was stopped. Blocks until done.

    Args:
        sources: files, directories, or hub:NAME of a dataset.
        tokenizer: its name, as for `--tokenizer` of `p2ptrain join`.
        field: field of a record that has the text.
        split: split of a dataset.
        held_out: share of the documents to hold out for evaluation, chosen by the hash of their text.
        jobs: number of processes.

    Raises ConfigError for bad input, or if `out` holds something else.
    """
    with _locked(out):
        if (out / META_FILE).exists():
            held = f"--out {out}: holds prepared data already ({META_FILE})"
            raise ConfigError(f"{held}; give another --out, or remove it")
        units = tuple(find_units(sources, split, say))
        for name in (*sources, *(unit.path for unit in units), field, split):
            _check_text(name)
        notes = out / UNFINISHED
        chosen = _tokenizer(tokenizer, out, units, field, split, say)
        job = Job(sources, units, field, split, held_out, chosen.identity, chosen.vocab_size, tokenizer)
        _claim(notes, job, out)
        if chosen.file:
            write_whole(out / TOKENIZER_FILE, chosen.file)
        done = _done(notes, len(units))
        if done:
            say(f"continuing: {len(done)} of {len(units)} parts are done")
        try:
            for number, found in _run(job, out, [n for n in range(len(units)) if n not in done], jobs):
                done[number] = found
                tokens = sum(shard.tokens for finished in done.values() for shard in finished.shards)
                on_progress(Progress(len(done), len(units), tokens))
        except ConfigError:
            if not any(found.shards for found in _done(notes, len(units)).values()):
                _withdraw(notes, out)
            raise
        in_order = [done[number] for number in range(len(units))]
        dtype: Any = token_dtype(chosen.vocab_size).__name__
        assert dtype in ("uint8", "uint16", "uint32")
        meta = Meta(
            version=1,
            tokenizer=chosen.identity,
            name=tokenizer,
            vocab_size=chosen.vocab_size,
            separator=chosen.separator,
            dtype=dtype,
            sources=list(sources),
            shards=[shard for found in in_order for shard in found.shards],
        )
        if (fault := _useless(meta)) is not None:
            _withdraw(notes, out)
            raise ConfigError(f"{', '.join(sources)}: {fault}")
        places = Counter[str]()
        for unit, found in zip(units, in_order, strict=True):
            if found.not_utf8:
                places[unit.path] += found.not_utf8
        if places:
            say(f"warning: {not_utf8_warning(places)}")
        write_whole(out / META_FILE, encoded(meta))
        shutil.rmtree(notes)
        return Prepared(meta, sum(d.empty for d in in_order), next((d.first_empty for d in in_order if d.empty), ""))


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Create the directory if it is missing, and lock it within the block. Errors of its files become ConfigErrors."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / LOCK_FILE, blocking=False):
            yield
    except Timeout:
        raise ConfigError(f"--out {out}: another process is preparing data there; wait for it") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: cannot be written or read ({error.strerror})") from error


def _tokenizer(
    name: str, out: Path, units: tuple[Unit, ...], field: str, split: str, say: Callable[[str], None]
) -> Tokenizer:
    """The named tokenizer. For train:N, the one of an interrupted preparation, or else one that is made here."""
    found = find_tokenizer(name)
    if found is not None:
        return found
    size, begun = trained_size(name), _begun(out) or {}
    if begun.get("name") == name and (made := read_tokenizer(out, begun.get("tokenizer", ""), 2)) is not None:
        return made
    say(f"making a tokenizer of {size:,} ids; with much text this takes minutes")
    began_s = time.monotonic()
    made = interruptible(partial(train_tokenizer, _sample(units, field, split), size))
    say(f"made it in {time.monotonic() - began_s:.0f} s: {made.vocab_size:,} ids")
    return made


def _sample(units: tuple[Unit, ...], field: str, split: str) -> Iterator[str]:
    """Text from the beginning of every unit, TRAINED_ON_CHARACTERS in all."""
    share = max(1, TRAINED_ON_CHARACTERS // len(units))
    for unit in units:
        taken = 0
        for document in read_documents(unit, field, split):
            yield document.text[:share]
            taken += len(document.text)
            if taken >= share:
                break


def _begun(out: Path) -> dict[str, str] | None:
    """The note of the job that was begun here; None if there is none. Raises ConfigError if it is damaged."""
    path = out / UNFINISHED / JOB_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        raise ConfigError(f"--out {out}: {path} is damaged; give another --out, or remove it") from None


def _claim(notes: Path, job: Job, out: Path) -> None:
    """Write down which job prepares this directory. Raises ConfigError if another one was begun here."""
    if (begun := _begun(out)) is not None:
        if begun.get("digest") != job.digest:
            raise ConfigError(
                f"--out {out}: another preparation was begun there (tokenizer {begun.get('name')!r}), or its sources "
                f"have changed; give the same command, another --out, or remove it"
            )
        return
    if foreign := [path.name for path in out.iterdir() if path.name not in (UNFINISHED, LOCK_FILE)]:
        raise ConfigError(f"--out {out}: is not empty ({foreign[0]}); give a new directory")
    notes.mkdir(exist_ok=True)
    noted = {"digest": job.digest, "tokenizer": job.tokenizer, "name": job.name}
    write_whole(notes / JOB_FILE, msgspec.json.encode(noted))


def _useless(meta: Meta) -> str | None:
    """Why these shards cannot be trained on, in words; None if they can."""
    training = [shard.tokens for shard in meta.shards if shard.split == "train"]
    if not meta.shards:
        return "no document with text was found to train on"
    if not training:
        return "all documents are held out; give more text, or a smaller --held-out"
    return too_few(max(training)) if len(training) == len(meta.shards) else None


def _withdraw(notes: Path, out: Path) -> None:
    """Remove what was written, so that a corrected command can use the same directory."""
    for pattern in (TOKENIZER_FILE, "train-[0-9]*.*", "val-[0-9]*.*"):
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)
    shutil.rmtree(notes)


def _run(job: Job, out: Path, numbers: list[int], jobs: int) -> Iterator[tuple[int, Done]]:
    """Prepare units in `jobs` processes; yields each as it is done. Raises the first error."""
    if jobs == 1 or len(numbers) <= 1:
        for number in numbers:
            yield number, prepare_unit(job, out, number)
        return
    # Spawned, because threads of the tokenizers library do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(numbers)), context, end_with_parent) as pool:
        try:
            number_of = {pool.submit(prepare_unit, job, out, number): number for number in numbers}
            for future in as_completed(number_of):
                yield number_of[future], future.result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "a process that prepares the data was killed, probably because memory ran out; give fewer --jobs; the "
                "same command continues"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def prepare_unit(job: Job, out: Path, number: int) -> Done:
    """Write the shards of one unit, and note them. Runs in a process of its own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # every process has one core
    tokenizer = read_tokenizer(out, job.tokenizer, job.vocab_size)
    assert tokenizer is not None
    split: dict[Literal["train", "val"], _Writer] = {
        "train": _Writer(out / f"train-{number:06d}.bin"), "val": _Writer(out / f"val-{number:06d}.bin")
    }  # fmt: skip
    empty, first_empty, num_wrong = 0, "", 0
    try:
        for batch in _batches(read_documents(job.units[number], job.field, job.split)):
            for document, ids in zip(batch, tokenizer.encode([document.text for document in batch]), strict=True):
                num_wrong += document.not_utf8
                if not len(ids):
                    empty, first_empty = empty + 1, first_empty or document.place
                    continue
                separator = tokenizer.separator if document.is_whole else None
                writer = split["val" if _is_held_out(document.text, job.held_out) else "train"]
                writer.add(ids.astype(ids.dtype.newbyteorder("<")).tobytes(), len(ids))
                if separator is not None:
                    writer.add(int(separator).to_bytes(ids.dtype.itemsize, "little"), 1)
                writer.documents += 1
        shards = [shard for name, writer in split.items() if (shard := writer.finish(name)) is not None]
    finally:
        for writer in split.values():
            writer.close()
    done = Done(shards, empty, first_empty, num_wrong)
    write_whole(out / UNFINISHED / f"{number:06d}.json", msgspec.json.encode(done))
    return done


class _Writer:
    """Writes one shard under a temporary name; hashes it as it is written."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_suffix(".part")
        self._stream = self._part.open("wb", buffering=2**20)
        self._hash = hashlib.sha256()
        self._tokens = self.documents = 0

    def add(self, content: bytes, tokens: int) -> None:
        self._stream.write(content)
        self._hash.update(content)
        self._tokens += tokens

    def finish(self, split: Literal["train", "val"]) -> Shard | None:
        """Give the file its name. If nothing was written, remove it and return None."""
        self.close()
        if not self._tokens:
            self._part.unlink()
            return None
        self._part.replace(self._path)
        return Shard(self._path.name, split, self.documents, self._tokens, self._hash.hexdigest())

    def close(self) -> None:
        self._stream.close()


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_held_out(text: str, share: float) -> bool:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def _done(notes: Path, units: int) -> dict[int, Done]:
    """The parts that are done, by number."""
    return {number: found for number in range(units) if (found := _note(notes, number)) is not None}


def _note(notes: Path, number: int) -> Done | None:
    """Read the note of a finished unit; None if it is not done."""
    try:
        return msgspec.json.decode((notes / f"{number:06d}.json").read_bytes(), type=Done)
    except (OSError, msgspec.MsgspecError):
        return None


def end_with_parent() -> None:
    """In a worker process: end it when its parent is killed, so that it does not write beside the next attempt."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _check_text(name: str) -> None:
    """Raise ConfigError for a name that JSON cannot hold."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = name.encode(errors="backslashreplace").decode()
        raise ConfigError(f"{shown}: is not UTF-8, as {META_FILE} needs it; give another name") from error
