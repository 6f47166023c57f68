"""Documents of text files, .jsonl, .parquet and Hugging Face datasets, cut into units that processes read one by one.

A unit is a file or a part of one, of at most UNIT_BYTES where the format allows it. A compressed file is one unit, and
so is a shard of a dataset. Nothing is loaded whole.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import zstandard

from p2ptrain.errors import ConfigError
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.files import raise_unreadable, user_path
from p2ptrain.training.data.text import (
    COMPRESSED,
    HOLDS_ZEROS,
    LOOKED_AT_BYTES,
    RECORDS,
    decode,
    is_binary,
    left_out_warning,
)
from p2ptrain.training.hub import is_hub_there, library_errors

UNIT_BYTES = 64 * 2**20
# Plain text has no documents: it is cut at line ends, so that some of it can be held out.
TEXT_BYTES = 64 * 2**10
LINES = (*RECORDS, ".json")
DATASET = "hub:"
# A directory that datasets' save_to_disk wrote has one of these files.
SAVED_DATASET = ("dataset_info.json", "dataset_dict.json")
ZSTD_READ_BYTES = 2**17
Kind = Literal["text", "jsonl", "parquet", "dataset"]


@dataclass(frozen=True)
class Unit:
    """A part of the data.

    Attributes:
        kind, path: how to read it, and the file, or the name of the dataset.
        start, end: bytes of a plain file, row groups of a .parquet file, or the number of a dataset's shard and their
            count. A line belongs to the unit in which it begins.
        size_bytes: shows that a source has changed; 0 if it is not known.
    """

    kind: Kind
    path: str
    start: int
    end: int
    size_bytes: int


@dataclass(frozen=True)
class Document:
    """A text, and where it is, for errors.

    Attributes:
        is_whole: whether a separator follows it.
        not_utf8: number of places that are not UTF-8.
    """

    text: str
    place: str
    is_whole: bool = True
    not_utf8: int = 0


def find_units(sources: tuple[str, ...], split: str, say: Callable[[str], None]) -> list[Unit]:
    """All units of files, directories and datasets, in order. Says which files of a directory are left out.

    Raises ConfigError if a source has none.
    """
    units: list[Unit] = []
    for source in sources:
        path = user_path(source)
        if source.startswith(DATASET) or any((path / name).is_file() for name in SAVED_DATASET):
            found = _dataset_units(source, split)
        elif path.is_file() or path.is_dir():
            kinds = {file: _kind(file) for file in _files(path)}
            if binary := [file for file, kind in kinds.items() if kind is None]:
                if path.is_file():
                    raise ConfigError(f"{source}: {HOLDS_ZEROS}; else give .txt, .jsonl or .parquet files")
                say(f"warning: {source}: {left_out_warning(binary)}")
            found = [unit for file, kind in kinds.items() if kind is not None for unit in _units_of(file, kind)]
        else:
            what = "neither a file nor a directory" if path.exists() else "no such file or directory"
            raise ConfigError(f"{source}: {what}; give files, directories or hub:NAME")
        if not found:
            raise ConfigError(f"{source}: holds no text; give .txt, .jsonl, .parquet files, or a directory of them")
        units += found
    return units


def read_documents(unit: Unit, field: str, split: str) -> Iterator[Document]:
    """The documents of a unit, in order. `field` of a record has its text. Raises ConfigError if data is not text."""
    try:
        if unit.kind == "text":
            yield from _text_documents(unit)
        elif unit.kind == "jsonl":
            yield from _json_documents(unit, field)
        elif unit.kind == "parquet":
            yield from _parquet_documents(unit, field)
        else:
            yield from _dataset_documents(unit, field, split)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise ConfigError(f"{unit.path}: is cut off or not compressed as its name says ({error})") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or unit.path}: cannot be read ({error.strerror or error})") from error


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path, onerror=raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    for file in found:
        if file.is_symlink() and not file.exists():
            target = os.readlink(file)
            raise ConfigError(f"{file}: is a link to a missing file ({target}); restore it, or remove the link")
    return [file for file in found if file.is_file() and file.stat().st_size]


def _kind(path: Path) -> Kind | None:
    """How to read a file; None if it is not text."""
    if path.suffix == ".parquet":
        return "parquet"
    if (Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix) in LINES:
        return "jsonl"
    if path.suffix in COMPRESSED:
        return "text"
    with path.open("rb") as stream:
        return None if is_binary(stream.read(LOOKED_AT_BYTES)) else "text"


def _units_of(path: Path, kind: Kind) -> list[Unit]:
    size, name = path.stat().st_size, str(path)
    if kind == "parquet":
        return _parquet_units(path)
    if path.suffix in COMPRESSED:
        return [Unit(kind, name, 0, -1, size)]
    starts = range(0, max(1, size), UNIT_BYTES)
    return [Unit(kind, name, start, min(size, start + UNIT_BYTES), min(size - start, UNIT_BYTES)) for start in starts]


def _open(unit: Unit) -> IO[bytes]:
    path = Path(unit.path)
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"))
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(path))
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """Reads a .zst file of any number of frames. Raises EOFError if the last one is cut off, unlike stream_reader."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._is_within_frame = False
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._is_within_frame = False
            compressed = compressed or self._file.read(ZSTD_READ_BYTES)
            if not compressed:
                if self._is_within_frame:
                    raise EOFError("the last frame has no end")
                return 0
            self._is_within_frame = True
            self._content = memoryview(self._frame.decompress(compressed))
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _lines(unit: Unit) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in this unit, with the byte at which each begins (in the text, if it is compressed)."""
    with _open(unit) as stream:
        at = 0
        if unit.start:
            # A line that begins exactly at the border belongs to this unit, so read from the byte before it.
            stream.seek(unit.start - 1)
            at = unit.start - 1 + len(stream.readline())
        while (unit.end < 0 or at < unit.end) and (line := stream.readline()):
            yield at, line
            at += len(line)


def _text_documents(unit: Unit) -> Iterator[Document]:
    lines: list[bytes] = []
    first = size = end = 0
    for at, line in _lines(unit):
        if b"\0" in line:
            raise ConfigError(f"{unit.path}, byte {at:,}: holds a zero byte, so it is not text; leave this file out")
        if size >= TEXT_BYTES:  # another piece follows, as there is this line
            yield _of_text(lines, unit, first, is_whole=False)
            lines, size = [], 0
        if not lines:
            first = at
        lines.append(line)
        size += len(line)
        end = at + len(line)
    if lines:
        # The last line of a unit may be the last one of the file, though another unit follows.
        is_last = unit.end < 0 or end >= Path(unit.path).stat().st_size
        yield _of_text(lines, unit, first, is_whole=is_last)


def _of_text(lines: list[bytes], unit: Unit, first: int, *, is_whole: bool) -> Document:
    text, num_wrong = decode(b"".join(lines))
    return Document(text, f"{unit.path}, byte {first:,}", is_whole, num_wrong)


def _json_documents(unit: Unit, field: str) -> Iterator[Document]:
    for at, line in _lines(unit):
        if not line.strip():
            continue
        place = f"{unit.path}, byte {at:,}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: is not a line of JSON ({error}); give .jsonl, one record a line") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{place}: is a {type(record).__name__}, not a record; give .jsonl, one record a line")
        yield _of_record(record, field, place)


def _parquet_units(path: Path) -> list[Unit]:
    require_extra("data", ".parquet")
    import pyarrow
    from pyarrow import parquet

    try:
        meta = parquet.ParquetFile(path).metadata
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: is not a .parquet file, or cut off ({error})") from error
    # Row groups may be small, and each unit becomes one or two files of tokens.
    units: list[Unit] = []
    start = size = 0
    for group in range(meta.num_row_groups):
        of_group = meta.row_group(group).total_byte_size
        if size and size + of_group > UNIT_BYTES:
            units.append(Unit("parquet", str(path), start, group, size))
            start, size = group, 0
        size += of_group
    return [*units, Unit("parquet", str(path), start, meta.num_row_groups, size)] if meta.num_row_groups else []


def _parquet_documents(unit: Unit, field: str) -> Iterator[Document]:
    from pyarrow import parquet

    file = parquet.ParquetFile(unit.path)
    if field not in file.schema_arrow.names:
        raise _no_field(field, file.schema_arrow.names, unit.path)
    for group in range(unit.start, unit.end):
        number = 0
        for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
            place = f"{unit.path}, row group {group}, row"
            try:
                texts = batch.column(0).to_pylist()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{place} {number:,} or one of the {len(batch)} after it: is not UTF-8 ({error}); write the "
                    "file anew"
                ) from error
            for text in texts:
                yield _of_record({field: text}, field, f"{place} {number:,}")
                number += 1


def _dataset_units(source: str, split: str) -> list[Unit]:
    count = max(1, int(getattr(_dataset(source, split), "num_shards", 1)))
    return [Unit("dataset", source, number, count, 0) for number in range(count)]


def _dataset_documents(unit: Unit, field: str, split: str) -> Iterator[Document]:
    shard = _dataset(unit.path, split).shard(num_shards=unit.end, index=unit.start)
    for number, record in enumerate(shard):
        yield _of_record(record, field, f"{unit.path}, split {split}, shard {unit.start}, row {number:,}")


def _dataset(source: str, split: str) -> Any:
    require_extra("data", f"{DATASET}NAME")
    import datasets

    check = "the name, --split and the connection" if source.startswith(DATASET) else "--split"
    name, _, config = source.removeprefix(DATASET).partition(":")
    is_hub_silent = source.startswith(DATASET) and not Path(name).is_dir() and not is_hub_there()
    what = f"{source}, split {split}: cannot be loaded"
    with library_errors(what, f"check {check}", is_hub_silent=is_hub_silent):
        if is_hub_silent:
            raise OSError("the hub does not answer")
        if source.startswith(DATASET):
            return datasets.load_dataset(name, config or None, split=split, streaming=True)
        found = datasets.load_from_disk(str(user_path(source)))
        return (found[split] if isinstance(found, datasets.DatasetDict) else found).to_iterable_dataset()


def _of_record(record: dict[str, Any], field: str, place: str) -> Document:
    if field not in record:
        raise _no_field(field, list(record), place)
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{place}: field {field!r} is a {type(text).__name__}, not text; give another --field")
    return Document(text or "", place)


def _no_field(field: str, known: list[str], place: str) -> ConfigError:
    return ConfigError(f"{place}: has no field {field!r}; give --field with one of: {', '.join(map(str, known[:20]))}")
