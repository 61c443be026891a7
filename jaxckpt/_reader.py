"""Pieces of many leaves -> host arrays, read once, verified, within the budget of host memory."""

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec import Struct

from jaxckpt._budget import Budget, Progress
from jaxckpt._collector import paused_collector
from jaxckpt._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from jaxckpt._location import Location
from jaxckpt._manifest import File, Index, Piece, digest
from jaxckpt._shards import Block, Shape, Slice, blocks, count_blocks, covers, is_contiguous
from jaxckpt._store import as_bytes
from jaxckpt._tasks import Tasks, in_thread
from jaxckpt._transfer import host_array, host_bytes

Bytes = np.ndarray[Any, Any]
Boxes = dict[Slice, np.ndarray[Any, Any]]

_MOST_RUNS = 64
"""So many wait for a thread at once: what has begun is finished also when another has failed."""
_GAP = memoryview(bytearray(4096))
"""Where the padding between the members of a pack is read to; nobody looks at it."""


class Wanted(Struct, frozen=True, gc=False):
    """The boxes of one stored leaf that are to be read."""

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    boxes: Sequence[Slice]
    pieces: Sequence["Stored"]


class Stored(Struct, frozen=True, gc=False):
    """A piece, and the file that holds it."""

    piece: Piece
    file: File
    location: Location

    @property
    def slice(self) -> Slice:
        return Slice(self.piece.start, self.piece.shape)

    @property
    def path(self) -> str:
        return f"{self.location}/{self.file.name}"


class _Copy(Struct, frozen=True, gc=False):
    """A box of a block that belongs into an array: both sides' numpy indices."""

    into: np.ndarray[Any, Any]
    at: tuple[Any, ...]
    of: tuple[Any, ...]


class _Read(Struct, frozen=True, gc=False):
    """One block, `nbytes` from `offset` of a file.

    It is read straight into `buffer`, or where that is None into scratch memory, from
    which `copies` are made. A mapped one is there already and only checked.
    """

    wanted: Wanted
    stored: Stored
    block: Block
    hash: str
    buffer: Bytes | None = None
    copies: tuple[_Copy, ...] = ()
    mapped: bool = False

    @property
    def offset(self) -> int:
        return self.stored.piece.offset + self.block.offset

    @property
    def scratch_nbytes(self) -> int:
        """What reading it takes beside the result. An object store delivers into memory of its own, twice."""
        buffers = (self.buffer is None) + 2 * (not self.stored.location.is_local)
        return self.block.nbytes * buffers


@paused_collector()
def by_leaf(indexes: Iterable[tuple[Index, Location]], where: str) -> dict[int, list[Stored]]:
    """The pieces of every leaf.

    Raises:
        CorruptCheckpointError: A piece names a file that its index does not list.
    """
    found: dict[int, list[Stored]] = defaultdict(list)
    for index, location in indexes:
        for piece in index.pieces:
            if piece.file >= len(index.files):
                raise CorruptCheckpointError(
                    f"{where}: a piece of leaf {piece.leaf} names file {piece.file}, which is not listed"
                )
            found[piece.leaf].append(Stored(piece, index.files[piece.file], location))
    return found


def check(name: str, shape: Shape, dtype: np.dtype[Any], pieces: Sequence[Stored], taken: dict[str, int]) -> None:
    """Whether the records of a leaf's pieces are sound, before anything is read or allocated by them.

    `taken` counts, over all leaves, how many bytes of each file belong to pieces.

    Raises:
        CorruptCheckpointError: They do not cover the leaf exactly, leave their files, or overlap in them.
    """
    if not all(len(p.piece.start) == len(p.piece.shape) == len(shape) for p in pieces):
        raise CorruptCheckpointError(f"leaf {name}: a piece has another rank than the leaf's {len(shape)}")
    if math.prod(shape) and not covers([stored.slice for stored in pieces], shape):
        raise CorruptCheckpointError(
            f"leaf {name}: its {len(pieces)} pieces do not cover its shape {shape} exactly once"
        )
    for stored in pieces:
        nbytes = stored.slice.size * dtype.itemsize
        if not nbytes:
            raise CorruptCheckpointError(f"leaf {name}: a piece in {stored.file.name} has no elements")
        path = stored.path
        taken[path] = taken.get(path, 0) + nbytes
        if taken[path] > stored.file.nbytes:
            raise CorruptCheckpointError(f"leaf {name}: pieces overlap in {path}: they have more bytes than it")
        if stored.piece.offset + nbytes > stored.file.nbytes:
            raise CorruptCheckpointError(f"leaf {name}: a piece ends after its file {stored.file.name}")
        if len(stored.piece.hashes) != count_blocks(stored.piece.shape, dtype.itemsize):
            raise CorruptCheckpointError(f"leaf {name}: a piece in {stored.file.name} has the wrong number of hashes")


def check_files(leaves: Iterable[tuple[str, Sequence[Stored]]]) -> None:
    """Whether the files of leaves, each a name and its pieces, are as large as recorded.

    Raises:
        CorruptCheckpointError: A file is missing, or of another size.
    """
    checked: set[str] = set()
    for name, pieces in leaves:
        for stored in pieces:
            # An object is looked at when it is read: to ask before would double the requests.
            if stored.location.is_local and stored.path not in checked:
                with _damage_of(name):
                    stored.location.check_size(stored.file.name, stored.file.nbytes)
                checked.add(stored.path)


class Fault(Struct, frozen=True, gc=False):
    """What is wrong with a file, as a message that names it and the leaf that suffers from it."""

    leaf: str
    file: str
    problem: str


class Reader:
    """Reads leaves of one checkpoint.

    Args:
        limit: Bytes of host memory for what is not the result itself.
        verify: Whether to compare hashes.
        memory_map: Whether boxes that lie in a file as they are wanted are mapped instead.
        progress: Told of the bytes that are read.
    """

    def __init__(self, limit: int, *, verify: bool, memory_map: bool, progress: Progress) -> None:
        self._scratch = Budget(limit)
        self._verify = verify
        self._memory_map = memory_map
        self._progress = progress
        self._maps: dict[str, Bytes] = {}
        self._runs = asyncio.Semaphore(_MOST_RUNS)

    async def read(self, leaves: Sequence[Wanted]) -> list[Boxes]:
        """The wanted boxes of each leaf. Each block is read once, however many boxes share it.

        Raises:
            CorruptCheckpointError: Bytes are missing or altered; names leaf and file.
            StorageError: They cannot be read.
        """
        found, runs = await in_thread(self._plan, leaves)
        async with Tasks() as tasks:
            for run in runs:
                scratch_nbytes = sum(read.scratch_nbytes for read in run)
                await self._scratch.acquire(scratch_nbytes)
                await self._runs.acquire()
                tasks.create_task(self._read_run(run, scratch_nbytes))
        return found

    async def find_faults(self, leaves: Sequence[Wanted]) -> list[Fault]:
        """Read and check every block of `leaves` and keep nothing but what is wrong with them."""
        found: list[Fault] = []

        async def examine(run: list[_Read], scratch_nbytes: int) -> None:
            try:
                found.extend(await in_thread(_examine, run))
            finally:
                self._scratch.release(scratch_nbytes)
            self._progress.add(sum(read.block.nbytes for read in run))

        async with Tasks() as tasks:
            for run in await in_thread(_all_runs, leaves):
                scratch_nbytes = sum(read.scratch_nbytes for read in run)
                await self._scratch.acquire(scratch_nbytes)
                tasks.create_task(examine(run, scratch_nbytes))
        return found

    async def _read_run(self, run: list[_Read], scratch_nbytes: int) -> None:
        try:
            await in_thread(_execute, run, verify=self._verify)
        finally:
            self._scratch.release(scratch_nbytes)
            self._runs.release()
        self._progress.add(sum(read.block.nbytes for read in run))

    @paused_collector()
    def _plan(self, leaves: Sequence[Wanted]) -> tuple[list[Boxes], list[list[_Read]]]:
        found: list[Boxes] = []
        reads: list[_Read] = []
        for wanted in leaves:
            boxes = {box: self._mapped(wanted, box) for box in wanted.boxes}
            mapped = {box for box, array in boxes.items() if array is not None}
            made = {
                box: host_array(box.shape, wanted.dtype) if array is None else array for box, array in boxes.items()
            }
            found.append(made)
            for stored in wanted.pieces:
                reads.extend(self._reads(wanted, stored, made, mapped))
        return found, _runs(reads)

    def _reads(self, wanted: Wanted, stored: Stored, boxes: Boxes, mapped: set[Slice]) -> Iterable[_Read]:
        """The blocks of one piece that `boxes` need."""
        hits = [box for box in boxes if box.intersect(stored.slice)]
        if not hits:
            return
        if hits == [stored.slice] and not mapped:  # by far the most frequent case
            buffer = as_bytes(boxes[hits[0]])
            for block, expected in zip(
                blocks(stored.piece.shape, wanted.dtype.itemsize), stored.piece.hashes, strict=True
            ):
                yield _Read(wanted, stored, block, expected, buffer[block.offset : block.offset + block.nbytes])
            return
        for block, expected in zip(blocks(stored.piece.shape, wanted.dtype.itemsize), stored.piece.hashes, strict=True):
            box_of_block = block.slice.shifted(stored.piece.start)
            shared = [(box, part) for box in hits if (part := box.intersect(box_of_block))]
            if any(box in mapped for box, _ in shared):
                whole_file = self._map(wanted, stored)
                start = stored.piece.offset + block.offset
                yield _Read(wanted, stored, block, expected, whole_file[start : start + block.nbytes], mapped=True)
            to_fill = [(box, part) for box, part in shared if box not in mapped]
            if not to_fill:
                continue
            box, part = to_fill[0]
            if len(to_fill) == 1 and part == box_of_block and is_contiguous(part.within(box), box.shape):
                yield _Read(wanted, stored, block, expected, as_bytes(boxes[box][part.within(box).index]))
            else:
                copies = tuple(
                    _Copy(boxes[box], part.within(box).index, part.within(box_of_block).index) for box, part in to_fill
                )
                yield _Read(wanted, stored, block, expected, copies=copies)

    def _mapped(self, wanted: Wanted, box: Slice) -> np.ndarray[Any, Any] | None:
        """The box as it lies in a file, where memory mapping is asked for and the box is one run of bytes."""
        if not self._memory_map or not box.size:
            return None
        for stored in wanted.pieces:
            if box.intersect(stored.slice) == box and is_contiguous(box.within(stored.slice), stored.piece.shape):
                first = np.ravel_multi_index(box.within(stored.slice).start, stored.piece.shape) if box.shape else 0
                start = stored.piece.offset + int(first) * wanted.dtype.itemsize
                raw = self._map(wanted, stored)[start : start + box.size * wanted.dtype.itemsize]
                return raw.view(wanted.dtype).reshape(box.shape)
        return None

    def _map(self, wanted: Wanted, stored: Stored) -> Bytes:
        if stored.path not in self._maps:
            with _damage_of(wanted.name):
                mapped = stored.location.map(stored.file.name, stored.file.nbytes)
            self._maps[stored.path] = np.frombuffer(mapped, np.uint8)
        return self._maps[stored.path]


def _runs(reads: list[_Read]) -> list[list[_Read]]:
    """Neighbours in a file together, as many as one thread should read at a time."""
    runs: list[list[_Read]] = []
    reads.sort(key=lambda read: (read.mapped, read.stored.path, read.offset))
    for _, same in itertools.groupby(reads, key=lambda read: (read.mapped, read.stored.path)):
        most, nbytes = 0, 0
        for read in same:
            if nbytes + read.block.nbytes > most:
                runs.append([])
                most, nbytes = read.stored.location.run_bytes, 0
            runs[-1].append(read)
            nbytes += read.block.nbytes
    return runs


@paused_collector()
def _all_runs(leaves: Sequence[Wanted]) -> list[list[_Read]]:
    """Every block of `leaves`, to be read into scratch memory."""
    return _runs(
        [
            _Read(wanted, stored, block, expected)
            for wanted in leaves
            for stored in wanted.pieces
            for block, expected in zip(
                blocks(stored.piece.shape, wanted.dtype.itemsize), stored.piece.hashes, strict=True
            )
        ]
    )


def _examine(run: list[_Read]) -> list[Fault]:
    """What is wrong with the blocks of one run; one by one where not all are right."""
    try:
        _execute(run, verify=True)
    except CheckpointError as error:
        if len(run) > 1:
            return [fault for read in run for fault in _examine([read])]
        return [Fault(run[0].wanted.name, run[0].stored.path, str(error))]
    return []


@paused_collector()
def _execute(run: list[_Read], *, verify: bool) -> None:
    """Read, check and copy the blocks of one run. Blocks."""
    buffers = [host_bytes(read.block.nbytes) if read.buffer is None else read.buffer for read in run]
    if not run[0].mapped:
        _fill(run, buffers)
    for read, buffer in zip(run, buffers, strict=True):
        if verify and digest(buffer) != read.hash:
            raise CorruptCheckpointError(
                f"leaf {read.wanted.name}: {read.block.nbytes} bytes at {read.offset} of "
                f"{read.stored.path} do not match their hash; the file was altered"
            )
        for copy in read.copies:
            copy.into[copy.at] = buffer.view(read.wanted.dtype).reshape(read.block.slice.shape)[copy.of]


def _fill(run: list[_Read], buffers: list[Bytes]) -> None:
    stored = run[0].stored
    with _damage_of(run[0].wanted.name):
        stored.location.read_into(stored.file.name, stored.file.nbytes, _segments(run, buffers))


@contextmanager
def _damage_of(leaf: str) -> Generator[None]:
    """Say which leaf suffers from what is wrong with a file."""
    try:
        yield
    except CheckpointNotFoundError as error:
        raise CorruptCheckpointError(f"leaf {leaf}: the file {error.filename} is missing") from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"leaf {leaf}: {error}") from error


def _segments(run: list[_Read], buffers: list[Bytes]) -> list[tuple[int, list[memoryview]]]:
    """Offsets, each with the buffers that are filled from there on; small gaps are read over."""
    segments: list[tuple[int, list[memoryview]]] = []
    end = -1
    for read, buffer in zip(run, buffers, strict=True):
        gap = read.offset - end
        if end < 0 or not 0 <= gap <= len(_GAP):
            segments.append((read.offset, []))
        elif gap:
            segments[-1][1].append(_GAP[:gap])
        segments[-1][1].append(buffer.data)
        end = read.offset + read.block.nbytes
    return segments
