"""Shards of many arrays -> chunk and pack files, overlapped, within the budget of host memory."""

import asyncio
import math
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from jaxckpt import _packs, _store
from jaxckpt._budget import Budget, Progress, default_host_bytes
from jaxckpt._collector import paused_collector
from jaxckpt._links import Links
from jaxckpt._location import Location
from jaxckpt._manifest import File, Index, Piece
from jaxckpt._options import MIB, SaveOptions
from jaxckpt._shards import Replicated, Slice, chunk_shape, chunks, owners, replicated, whole
from jaxckpt._store import Layout, pack_layout
from jaxckpt._tasks import Tasks, in_thread
from jaxckpt._tensorstore import Context, context
from jaxckpt._trace import Trace
from jaxckpt._transfer import (
    PinnedCopies,
    Shard,
    Staging,
    by_device,
    copy_into,
    cut,
    host_bytes,
    is_copied_by_cores,
    shards,
    view,
    way,
)

_STAGING_BYTES = 128 * MIB


class Source(Struct, frozen=True, gc=False):
    """An array to be written as leaf `number`: a Zarr array of its own, or packed where `layout` is None."""

    number: int
    data: Any
    layout: Layout | None


class _Part(Struct, frozen=True, gc=False):
    """The box `box` of a source, to be taken from `data`, which covers the box `held`."""

    source: Source
    box: Slice
    data: Any
    held: Slice
    way: Literal["direct", "pinned", "staged", "copied"]

    @property
    def nbytes(self) -> int:
        return self.box.size * self.data.dtype.itemsize

    @property
    def inner(self) -> Slice:
        """The box in the coordinates of `data`."""
        return self.box.within(self.held)

    def copy_into(self, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return copy_into(raw, self.data, self.inner)


_Member = tuple[_Part, int]
"""A part and its offset in a pack."""
_Filled = tuple[_Part, int, list[str]]
"""A part, its offset in a pack, and its hashes."""


@dataclass(frozen=True, slots=True)
class _PackJob:
    members: list[_Member]
    layout: Layout


class Writer:
    """Writes the arrays of one save.

    Args:
        options: Of the save.
        copy_numpy: Whether numpy arrays may change before `write` returns.
        on_progress: Told of the bytes that are written, `(done, total)`.
        trace: Told of what happens when.

    Attributes:
        limit: The most host memory, in bytes, for copies of array data.
        written_nbytes: Bytes of array data that were written, padding included, and not linked.
    """

    def __init__(
        self,
        options: SaveOptions,
        *,
        copy_numpy: bool,
        on_progress: Callable[[int, int], None] | None,
        trace: Trace,
    ) -> None:
        limit = options.max_host_bytes or default_host_bytes()
        self._options = options
        self._copy_numpy = copy_numpy
        self._on_progress = on_progress
        self._trace = trace
        self._staging_bytes = min(_STAGING_BYTES, limit // 2)
        self._most_pinned_bytes = limit // 2
        # A quarter of the budget at most, so that one piece moves while another is written. Several
        # processes must agree on the chunks, so what one of them has free does not count.
        agreed = limit if jax.process_count() == 1 else options.max_host_bytes or sys.maxsize
        self._chunk_bytes = min(options.chunk_bytes, agreed // 4)
        self.limit = limit
        self._contexts: dict[Context | None, Context] = {}
        self._copies = PinnedCopies()
        self._filling = asyncio.Lock()
        self._copying = asyncio.Lock()
        self._files: dict[str, File] = {}
        self._pieces: list[tuple[int, Slice, str, int, list[str]]] = []
        self._packs: list[Layout] = []
        self.written_nbytes = 0

    def source(self, number: int, data: Any, root: Location, name: str, *, packable: bool = True) -> Source:
        """Decide whether an array gets a Zarr array of its own, `name` below `root`, or is packed."""
        shard = data.sharding.shard_shape(data.shape) if isinstance(data, jax.Array) else data.shape
        if packable and math.prod(shard) * data.dtype.itemsize < max(1, self._options.pack_below_bytes):
            return Source(number, data, None)
        share = math.ceil(math.prod(shard) * data.dtype.itemsize / _copies(data))
        target = min(self._chunk_bytes, max(share, self._options.pack_below_bytes, MIB))
        chunk = chunk_shape(shard, data.shape, data.dtype.itemsize, target)
        return Source(number, data, Layout(root.child(name), name or str(number), data.shape, data.dtype, chunk))

    async def write(
        self,
        sources: Sequence[Source],
        packs: Location | None,
        captured: Callable[[], None],
        links: Links | None = None,
    ) -> Index:
        """Write all data of `sources`; durable when this returns, but for the directories.

        Calls `captured` once everything may be changed, donated or deleted by its owner.
        Packs, for sources without a layout, go below `packs`. What `links` has is not written.
        """
        self._links = links
        self._pack_root = packs
        self._pack_bytes = min(packs.pack_bytes if packs else 0, self.limit // 4)
        parts = await self._parts(sources)
        self._progress = Progress(sum(part.nbytes for part in parts), self._on_progress)
        staged = [part.nbytes for part in parts if part.way == "staged" and part.source.layout]
        slot_bytes = max(staged, default=0)
        self._staging = Staging(slot_bytes, min(len(staged), max(1, self._staging_bytes // max(1, slot_bytes))))
        self._budget = Budget(self.limit - self._staging.nbytes)
        self._arrays = {
            source.number: await self._open(source.layout) for source in sources if source.layout is not None
        }
        jobs = [*(part for part in parts if part.source.layout), *self._pack_jobs(parts)]
        async with Tasks() as tasks:
            # What is not a view of captured memory goes first: the caller waits for it.
            for job in jobs:
                if not _is_captured(job):
                    await self._start(job, tasks)
            captured()
            for job in jobs:
                if _is_captured(job):
                    await self._start(job, tasks)
        return self._index()

    def layouts(self, sources: Iterable[Source]) -> list[Layout]:
        """Every Zarr array of this save, packs included, once `write` has returned."""
        linked = self._links.packs if self._links else []
        return [*(source.layout for source in sources if source.layout is not None), *self._packs, *linked]

    async def _parts(self, sources: Sequence[Source]) -> list[_Part]:
        """All parts in the order of the sources; shards that the host can address become views here."""
        with paused_collector():
            found: list[_Part] = []
            shared: list[Source] = []
            for source in sources:
                if not isinstance(source.data, jax.Array):
                    found.extend(self._numpy_parts(source))
                elif source.data.is_fully_addressable:
                    for shard in shards(source.data):
                        found.extend(self._shard_parts(source, shard))
                else:
                    shared.append(source)
            found.extend(self._shared_parts(shared))
        return await in_thread(_with_views, found)

    def _shard_parts(self, source: Source, shard: Shard) -> list[_Part]:
        chosen = way(shard.data, self._options.transfer, self._most_pinned_bytes)
        boxes = [shard.slice]
        if chosen == "staged" and source.layout is not None:
            boxes = list(chunks(shard.slice, source.layout.chunk))
        return [_Part(source, box, shard.data, shard.slice, chosen) for box in boxes]

    def _shared_parts(self, sources: Sequence[Source]) -> Iterator[_Part]:
        """What of arrays that several processes hold is this one's to write."""
        units = [
            (source, held, box)
            for source in sources
            for held in replicated(source.data.sharding, source.data.shape)
            for box in _units(source, held)
        ]
        here = jax.process_index()
        local = {source.number: by_device(source.data) for source in sources}
        nbytes = [(held.processes, box.size * source.data.dtype.itemsize) for source, held, box in units]
        for (source, held, box), owner in zip(units, owners(nbytes), strict=True):
            if owner == here:
                data = local[source.number][held.devices[held.processes.index(here)]]
                if box == held.slice:
                    yield from self._shard_parts(source, Shard(box, data))
                else:
                    chosen = way(data, self._options.transfer, self._most_pinned_bytes)
                    yield _Part(source, box, data, held.slice, chosen)

    def _numpy_parts(self, source: Source) -> list[_Part]:
        box = whole(source.data.shape)
        if not box.size:
            return []
        if not self._copy_numpy and source.data.flags.c_contiguous:
            return [_Part(source, box, source.data, box, "direct")]
        boxes = chunks(box, source.layout.chunk) if source.layout else [box]
        return [_Part(source, part, source.data, box, "copied") for part in boxes]

    @paused_collector()
    def _pack_jobs(self, parts: Sequence[_Part]) -> list[_PackJob]:
        small = [part for part in parts if part.source.layout is None]
        jobs = []
        for number, pack in enumerate(_packs.plan([part.nbytes for part in small], self._pack_bytes)):
            layout = self._pack_layout(f"{jax.process_index()}-{number}", pack.nbytes)
            members = [(small[item], offset) for item, offset in zip(pack.items, pack.offsets, strict=True)]
            jobs.append(_PackJob(members, layout))
        return jobs

    def _pack_layout(self, name: str, nbytes: int) -> Layout:
        assert self._pack_root is not None
        return pack_layout(self._pack_root, name, nbytes)

    async def _open(self, layout: Layout) -> Any:
        shared = layout.location.shared
        if shared not in self._contexts:
            self._contexts[shared] = context(shared)
        return await _store.open_array(layout, self._contexts[shared])

    async def _start(self, job: _Part | _PackJob, tasks: Tasks) -> None:
        """Begin a job as a task; return when its data are captured."""
        captured = asyncio.Event()
        run = self._write_pack(job, captured) if isinstance(job, _PackJob) else self._write_part(job, captured)
        tasks.create_task(run)
        await captured.wait()

    async def _write_part(self, part: _Part, captured: asyncio.Event) -> None:
        layout = part.source.layout
        assert layout is not None
        async with self._on_host(part, captured) as host, Tasks() as tasks:
            for box in chunks(part.box, layout.chunk):
                tasks.create_task(self._write_chunk(part.source.number, layout, box, host[box.within(part.box).index]))

    @asynccontextmanager
    async def _on_host(self, part: _Part, captured: asyncio.Event) -> AsyncGenerator[np.ndarray[Any, Any]]:
        """The bytes of `part` in host memory that the budget allows, set `captured` as soon as they are safe."""
        match part.way:
            case "direct":
                captured.set()
                yield part.data[part.inner.index]
            case "pinned":
                async with self._budget.reserve(part.nbytes):
                    async with self._copying if is_copied_by_cores(part.data) else nullcontext():
                        with self._transferring(part):
                            # Quick, and so all allocated by one thread.
                            finish = self._copies.start([cut(part.data, part.inner)])
                            captured.set()
                            (host,) = await in_thread(finish)
                    yield host
            case "staged":
                async with self._staging.slot() as slot:
                    # The budget is for what a device without shared memory copies to.
                    async with self._budget.reserve(part.nbytes):
                        with self._transferring(part):
                            host = await in_thread(part.copy_into, slot)
                    captured.set()
                    yield host
            case "copied":
                async with self._budget.reserve(part.nbytes):
                    with self._transferring(part):
                        host = await in_thread(part.copy_into, host_bytes(part.nbytes))
                    captured.set()
                    yield host

    def _transferring(self, part: _Part) -> AbstractContextManager[None]:
        return self._trace.span("transfer", way=part.way, leaf=part.source.number, box=part.box, nbytes=part.nbytes)

    async def _hashes(self, file: File, data: np.ndarray[Any, Any]) -> list[str]:
        with self._trace.span("hash", file=file.name, nbytes=data.nbytes):
            return await in_thread(_store.hashes, _store.as_bytes(data), data.shape, data.dtype.itemsize)

    async def _write_chunk(self, number: int, layout: Layout, box: Slice, data: np.ndarray[Any, Any]) -> None:
        data = np.asarray(data, order="C")
        file = File(name=layout.file(box.start), nbytes=layout.chunk_nbytes)
        if self._links and self._links.has(number, box):
            hashes = await self._hashes(file, data)
            if not await in_thread(self._links.chunk, number, box, layout, hashes):
                await self._write_data(self._arrays[number], box, data, layout)
        else:
            async with Tasks() as tasks:
                hashed = tasks.create_task(self._hashes(file, data))
                await self._write_data(self._arrays[number], box, data, layout)
            hashes = hashed.result()
        self._record(number, box, file, 0, hashes)
        self._progress.add(data.nbytes)

    async def _write_data(self, array: Any, box: Slice, data: np.ndarray[Any, Any], layout: Layout) -> None:
        with self._trace.span("write", file=layout.file(box.start), nbytes=data.nbytes):
            await _store.write(array, box, data, layout)
        self.written_nbytes += layout.chunk_nbytes

    async def _write_pack(self, job: _PackJob, captured: asyncio.Event) -> None:
        pinned = [member for member in job.members if member[0].way == "pinned"]
        now = [member for member in job.members if member[0].way in ("staged", "copied")]
        later = [member for member in job.members if member[0].way == "direct"]
        async with self._budget.reserve(job.layout.chunk_nbytes * (2 if pinned else 1)):
            buffer = host_bytes(job.layout.chunk_nbytes)
            finish = self._copies.start([part.data for part, _ in pinned])
            filled = await self._fill(buffer, now)
            captured.set()
            hosts = await in_thread(finish)
            later += [(replace(part, data=host), at) for (part, at), host in zip(pinned, hosts, strict=True)]
            filled += await self._fill(buffer, later)
            layout = job.layout
            fresh = await in_thread(self._link_packed, self._links, filled) if self._links else filled
            if 0 < len(fresh) < len(filled):
                buffer, fresh = await in_thread(_compacted, buffer, fresh)
                layout = self._pack_layout(os.path.basename(layout.name), len(buffer))
            if fresh:
                self._packs.append(layout)
                await self._write_data(await self._open(layout), whole(layout.shape), buffer, layout)
        file = File(name=layout.file((0,)), nbytes=layout.chunk_nbytes)
        for part, offset, hashes in fresh:
            self._record(part.source.number, part.box, file, offset, hashes)
        self._progress.add(sum(part.nbytes for part, _ in job.members))

    def _link_packed(self, links: Links, filled: list[_Filled]) -> list[_Filled]:
        """Record those members of a pack that an earlier one holds unchanged; return the others."""
        fresh: list[_Filled] = []
        for part, offset, hashes in filled:
            if found := links.packed(part.source.number, part.box, hashes):
                self._record(part.source.number, part.box, *found, hashes)
            else:
                fresh.append((part, offset, hashes))
        return fresh

    async def _fill(self, buffer: np.ndarray[Any, Any], members: list[_Member]) -> list[_Filled]:
        """Copy parts to their places in a pack, and hash them.

        One pack at a time: two threads that do many small copies wait for the interpreter
        lock more than they copy.
        """
        async with self._filling:
            with self._trace.span("copy and hash", parts=len(members), nbytes=buffer.nbytes):
                return await in_thread(_fill, buffer, members)

    def _record(self, leaf: int, box: Slice, file: File, offset: int, hashes: list[str]) -> None:
        self._files[file.name] = file
        self._pieces.append((leaf, box, file.name, offset, hashes))

    @paused_collector()
    def _index(self) -> Index:
        """All that was written, in an order that does not depend on which write ended first."""
        files = sorted(self._files)
        numbers = {name: number for number, name in enumerate(files)}
        pieces = [
            Piece(leaf=leaf, start=box.start, shape=box.shape, file=numbers[name], offset=offset, hashes=hashes)
            for leaf, box, name, offset, hashes in sorted(self._pieces, key=lambda piece: (piece[0], piece[1].start))
        ]
        return Index(files=[self._files[name] for name in files], pieces=pieces)


def _copies(data: Any) -> int:
    """How many processes hold each slice of an array, and so can share the writing of it."""
    if not isinstance(data, jax.Array) or data.is_fully_addressable:
        return 1
    return max((len(held.processes) for held in replicated(data.sharding, data.shape)), default=1)


def _units(source: Source, held: Replicated) -> Iterable[Slice]:
    """What of a slice is written by one process: all of it where one holds it or it is packed, else each chunk."""
    if source.layout is None or len(held.processes) == 1:
        return [held.slice]
    return chunks(held.slice, source.layout.chunk)


def _is_captured(job: _Part | _PackJob) -> bool:
    """Whether all data of `job` are views of memory that stays as it is."""
    parts = [part for part, _ in job.members] if isinstance(job, _PackJob) else [job]
    return all(part.way == "direct" for part in parts)


@paused_collector()
def _with_views(parts: list[_Part]) -> list[_Part]:
    return [replace(part, data=view(part.data)) if part.way == "direct" else part for part in parts]


@paused_collector()
def _fill(buffer: np.ndarray[Any, Any], members: list[_Member]) -> list[_Filled]:
    filled: list[_Filled] = []
    for part, offset in members:
        raw = buffer[offset : offset + part.nbytes]
        part.copy_into(raw)
        filled.append((part, offset, _store.hashes(raw, part.box.shape, part.data.dtype.itemsize)))
    return filled


def _compacted(buffer: np.ndarray[Any, Any], filled: list[_Filled]) -> tuple[np.ndarray[Any, Any], list[_Filled]]:
    """A smaller pack of those parts of `buffer` alone."""
    sizes = [part.nbytes for part, _, _ in filled]
    (pack,) = _packs.plan(sizes, len(buffer))
    compact = host_bytes(pack.nbytes)
    moved: list[_Filled] = []
    for (part, old, hashes), new in zip(filled, pack.offsets, strict=True):
        compact[new : new + part.nbytes] = buffer[old : old + part.nbytes]
        moved.append((part, new, hashes))
    return compact, moved
