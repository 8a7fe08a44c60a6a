"""Write torch's one-file checkpoints from several processes, with checksums, and list their records.

::

    last.ckpt    data.pkl | data/0 | data/1 | ... | version | table of records

``torch.save`` writes the file without the values of storages. Then each rank writes its ranges of values into the gaps,
and rank 0 writes each record's checksum into the table of records, where any zip tool can read the checksum."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import struct
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage

from lightning_zero.checkpoint.durable import naming, write_at, written_aside
from lightning_zero.ranks.progress import SILENT, Did, LongWork
from lightning_zero.settings import MIB
from lightning_zero.tiers.pages import byte_view
from lightning_zero.tiers.remote import Place, RemotePath

CHUNK_NBYTES = 16 * MIB
WriteAt = Callable[[memoryview, int], None]  # (bytes, offset in the file): writes all the bytes there
_FLAGS = 0x808  # of a torch.save record: a checksum follows it, and its name is UTF-8
_FOLDER = 0x10
_DESCRIPTOR = b"PK\x07\x08"
_POLYNOMIAL = 0xEDB88320  # reflected: bit 31 is the constant term
_ONES = 0xFFFFFFFF


class Record(NamedTuple):
    """A record of a zip file: name, offset of the content, its size and CRC-32 (valid once all bytes are written)."""

    name: str
    start: int
    nbytes: int
    crc: int


class Piece(NamedTuple):
    record: str
    start: int  # in the record
    nbytes: int
    crc: int


class Skeleton:
    """A checkpoint file without tensor values. ``holes``: for each storage (by ``_cdata``) the record of its values."""

    def __init__(self, checkpoint: Any, fd: int) -> None:
        """Write ``checkpoint`` without values to the empty file ``fd``. Fake tensors are written as plain tensors."""
        self._fd = fd
        self._storages: dict[int, tuple[str, UntypedStorage]] = {}
        with os.fdopen(fd, "r+b", closefd=False) as file:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(checkpoint, file, pickle_module=self._noting())  # type: ignore[arg-type]
            file.flush()
            self._records = {r.name: r for r in records_of(file)}
        self.holes = {cdata: self._records[f"data/{key}"] for cdata, (key, _) in self._storages.items()}

    def _noting(self) -> Any:
        """Return an object for ``torch.save`` to use as the module ``pickle``. Its pickler adds the record key of each
        storage that it pickles to ``self._storages``."""
        noted = self._storages

        class Noting(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                theirs = cls.persistent_id

                def persistent_id(self: Any, obj: Any) -> Any:
                    found = theirs(self, obj)
                    if found is not None:
                        storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
                        noted[storage._cdata] = found[2], storage
                    return found

                cls.persistent_id = persistent_id  # type: ignore[method-assign, assignment]

        class Module:
            __name__ = "pickle"
            Pickler = Noting

        return Module()

    def fill(self, did: Did = lambda nbytes: None) -> list[Piece]:
        """Write the values of all storages except those of fake tensors. Return the written pieces with their
        checksums. ``did`` is called with the size in bytes of each written storage."""
        done: list[Piece] = []
        for cdata, (_, storage) in self._storages.items():
            if storage.device.type != "meta":
                values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                done += write_values(partial(write_at, self._fd), self.holes[cdata], 0, values)
                did(values.numel())
        return done

    def finish(self, done: Iterable[Piece], *, may_have_gaps: Callable[[str], bool] = lambda _: False) -> None:
        """Write the checksums, once all values are in the file. Raises RuntimeError for missing or repeated values.

        Args:
            done: the pieces that all ranks have written.
            may_have_gaps: returns, given a record's name, whether bytes of it may be missing; these count as zeros.
        """
        found: dict[str, list[Piece]] = defaultdict(list)
        for piece in done:
            found[piece.record].append(piece)
        sums = {
            hole.name: add_up(hole.name, hole.nbytes, found[hole.name], gaps_are_zeros=may_have_gaps(hole.name))
            for hole in self.holes.values()
        }
        with os.fdopen(self._fd, "r+b", closefd=False) as file, zipfile.ZipFile(file, "a") as archive:
            for info in archive.infolist():
                name = info.filename.partition("/")[2]
                if name in sums:
                    info.CRC = sums[name]
                    self.describe(name, sums[name])
            archive.comment = b""  # makes zipfile rewrite the table

    def describe(self, name: str, crc: int) -> None:
        """Write the checksum ``crc`` into the descriptor after the bytes of the record ``name``, if the record has a
        descriptor, for readers that do not use the table of records."""
        hole = self._records[name]
        if os.pread(self._fd, 4, hole.start + hole.nbytes) == _DESCRIPTOR:
            os.pwrite(self._fd, struct.pack("<I", crc), hole.start + hole.nbytes + 4)


@contextlib.contextmanager
def archive_at(target: Place, nbytes: int) -> Iterator[tuple[int, WriteAt]]:
    """Yield the descriptor of a new file for a :class:`Skeleton`, and a function that writes values into the file. Call
    this function with increasing offsets. When the body ends, the complete file is at ``target``. ``nbytes``: its
    approximate size. For an object store the descriptor is of a local file, which is uploaded with the values."""
    if not isinstance(target, RemotePath):
        with written_aside(target) as part:
            yield part.fd, partial(write_at, part.fd)
        return
    with naming(target), tempfile.TemporaryFile() as file, target.uploading(nbytes) as upload:

        def write(data: memoryview, offset: int) -> None:
            while (start := upload.tell()) < offset:
                upload.write(os.pread(file.fileno(), min(offset - start, MIB), start))
            upload.write(data)

        yield file.fileno(), write
        write(memoryview(b""), os.fstat(file.fileno()).st_size)


def write_archive(checkpoint: Any, fd: int, name: str = "", long_work: LongWork = SILENT) -> None:
    """Write ``checkpoint``, whose values are all on this rank, to the empty file of descriptor ``fd``, and sync the
    file. ``name``: the file's name in the progress lines of ``long_work``."""
    skeleton = Skeleton(checkpoint, fd)
    total = sum(hole.nbytes for hole in skeleton.holes.values())
    with long_work.bytes(f"saving {name}", lambda: total) as did:
        done = skeleton.fill(did)
    skeleton.finish(done)
    long_work.call(partial(os.fsync, fd), f"{name}, to the disk")


def write_values(
    write: WriteAt, hole: Record, start: int, values: Tensor, dtype: torch.dtype | None = None
) -> list[Piece]:
    """Write ``values`` [n], cast to ``dtype`` (None: not cast), into the record ``hole``, from byte ``start`` of the
    record on. ``write`` writes the bytes. Return the written pieces with their checksums."""
    dtype = dtype if dtype is not None else values.dtype
    size, done = dtype.itemsize, list[Piece]()
    step = CHUNK_NBYTES // size
    for low in range(0, values.numel(), step):
        part = values[low : low + step].detach().to(device="cpu", dtype=dtype).contiguous()
        data = byte_view(part)
        offset = start + low * size
        write(data, hole.start + offset)
        done.append(Piece(hole.name, offset, len(data), zlib.crc32(data)))
    return done


# -- the checksum of a record, from those of its pieces ----------------------------------------------------------------
#
# A CRC is linear: for two adjacent pieces multiply the first checksum by ``x ** (8 * length of the second)``, as a
# polynomial over GF(2), and add the second. Source: M. Adler, zlib's ``crc32_combine``, in Python from 3.15 on.


def add_up(record: str, nbytes: int, found: Iterable[Piece], *, gaps_are_zeros: bool = False) -> int:
    """Compute the CRC-32 of the record named ``record``, which has ``nbytes`` bytes, from those of its pieces
    ``found``. Raises RuntimeError if pieces overlap or, unless ``gaps_are_zeros``, if there are gaps between pieces."""
    crc, position = 0, 0
    for piece in [*sorted(found), Piece(record, nbytes, 0, 0)]:
        gap = piece.start - position
        if gap < 0 or (gap and not gaps_are_zeros):
            raise RuntimeError(f"{record}: bytes {position} to {piece.start} were written twice or not at all")
        zeros = _times(_shift(gap), _ONES) ^ _ONES
        crc = combine(combine(crc, zeros, gap), piece.crc, piece.nbytes)
        position = piece.start + piece.nbytes
    return crc


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two adjacent pieces from the CRC-32 of each. ``length``: bytes of the second piece."""
    return _times(_shift(length), first) ^ second


@functools.lru_cache(4096)
def _shift(length: int) -> int:
    """Return the polynomial ``x ** (8 * length)`` modulo the polynomial of CRC-32, with its coefficients as bits."""
    result = 1 << 31
    for k in range(length.bit_length()):
        if length >> k & 1:
            result = _times(_power(k), result)
    return result


@functools.cache
def _power(k: int) -> int:
    """Return the polynomial ``x ** (8 * 2 ** k)`` modulo the polynomial of CRC-32, with its coefficients as bits."""
    return _times(_power(k - 1), _power(k - 1)) if k else 1 << 23


def _times(a: int, b: int) -> int:
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


# -- reading ----------------------------------------------------------------------------------------------------------


def records_of(file: BinaryIO) -> list[Record]:
    """Return the records of a file that torch.save has written. Raises zipfile.BadZipFile for other or truncated files,
    and if torch and ``zipfile`` read the table of records differently. OSErrors of reading the file are passed on."""
    try:
        return _records_of(file)
    except zipfile.BadZipFile:
        raise
    except Exception as error:  # zipfile and torch raise almost anything for a damaged table
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a place outside the file
            raise
        raise zipfile.BadZipFile(f"its table of records: {type(error).__name__}: {error}") from error


def _records_of(file: BinaryIO) -> list[Record]:
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in infos.values():
            archive.open(info).close()  # compares the table with the header before the record
            compressed = info.compress_type or info.compress_size != info.file_size
            if compressed or info.flag_bits & ~_FLAGS or info.external_attr & _FOLDER:  # torch reads no values from it
                raise zipfile.BadZipFile(
                    f"its table of records has an entry for {info.filename} unlike those of torch.save"
                )
    file.seek(0)  # torch starts at the current position
    reader = cast(Any, torch._C.PyTorchFileReader)(file)
    if sorted(reader.get_all_records()) != sorted(infos):
        raise zipfile.BadZipFile("its table of records has names twice, or other names than torch finds")
    return [Record(name, reader.get_record_offset(name), info.file_size, info.CRC) for name, info in infos.items()]
