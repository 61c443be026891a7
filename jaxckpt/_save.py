"""A tree -> a published checkpoint, read from top to bottom."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import msgspec
import numpy as np

from jaxckpt import _commit, _reader, _store, _tree
from jaxckpt._budget import Progress
from jaxckpt._collector import paused_collector
from jaxckpt._errors import (
    CheckpointError,
    CorruptCheckpointError,
    LeafMismatchError,
    PeerError,
    StorageError,
)
from jaxckpt._info import CheckpointInfo, info
from jaxckpt._links import Known, Links
from jaxckpt._location import Location
from jaxckpt._manifest import (
    FORMAT_VERSION,
    File,
    Index,
    IndexFile,
    Leaf,
    Manifest,
    Node,
    Timings,
    Value,
    digest,
    dtype_named,
    encode_index,
    name_of,
)
from jaxckpt._options import SaveOptions
from jaxckpt._processes import Conversation
from jaxckpt._reader import Reader, Wanted
from jaxckpt._shards import Slice, describe
from jaxckpt._store import Layout
from jaxckpt._tasks import clean_up, each_in_thread, in_thread
from jaxckpt._trace import Trace
from jaxckpt._writer import Source, Writer


@dataclass(frozen=True, slots=True)
class Request:
    """How a public call wants to save. The last two are for our own callers.

    `conversation` is what this process has with the others of its program about this save.
    `metadata` and `local_data` are JSON already. `base` is a checkpoint to link from.
    `copy_numpy` is whether numpy leaves may change while the save runs; `captured` is
    called when the caller may change, donate or delete everything it passed.
    """

    options: SaveOptions
    overwrite: bool
    conversation: Conversation
    on_progress: Callable[[int, int], None] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    local_data: Any = None
    base: Location | None = None
    copy_numpy: bool = True
    captured: Callable[[], None] = lambda: None

    def writer(self, trace: Trace) -> Writer:
        return Writer(self.options, copy_numpy=self.copy_numpy, on_progress=self.on_progress, trace=trace)


class Opening(msgspec.Struct, frozen=True):
    """What the first process tells the others when a save begins.

    `tree` is a hash of the records of the tree, which must be those of every process.
    `elsewhere` are the leaves that a single other process holds.
    """

    attempt: str
    created: str
    path: str
    tree: str
    elsewhere: list[int]


class _Closing(msgspec.Struct, frozen=True):
    """What the first process tells the others when a save is committed."""

    indexes: list[IndexFile]
    timings: Timings
    metadata: dict[str, Any]
    local_data: list[Any]


class _Share(msgspec.Struct, frozen=True):
    """What every other process tells the first when its data are durable."""

    index: IndexFile
    local_data: Any


@dataclass(frozen=True, slots=True)
class _Plan:
    """A tree as records, and the arrays in it: what is to be saved."""

    nodes: list[Node]
    leaves: list[Leaf]
    sources: list[Source]

    def digest(self) -> str:
        return digest(msgspec.json.encode([self.nodes, self.leaves]))


async def save(root: Location, tree: Any, request: Request) -> CheckpointInfo:
    """Write `tree` as a checkpoint at `root`. It exists, durably, when this returns, and not before."""
    began = time.monotonic()
    talk = request.conversation
    trace = Trace(request.options.trace_directory)
    captured_seconds = 0.0

    def captured() -> None:
        nonlocal captured_seconds
        captured_seconds = time.monotonic() - began
        request.captured()

    attempt: _commit.Attempt | None = None
    try:
        with paused_collector():
            flat = _tree.flatten(tree)
            kinds = [_tree.kind_of(leaf, path) for leaf, path in zip(flat.leaves, flat.paths, strict=True)]
            nodes, names = _tree.nodes(flat), _tree.names(flat.paths)
        opening = None if talk.is_first else await talk.hear("begin", Opening)
        attempt = _attempt(root, request, opening)
        writer = request.writer(trace)
        with trace.span("begin"):
            with paused_collector():
                plan = _plan(flat, kinds, nodes, names, writer, attempt.data)
            ours = await _begin(root, attempt, plan, talk, opening)
            links = await in_thread(_links, request.base, plan, attempt.data)
        index = await writer.write(ours, attempt.data, captured, links)
        with trace.span("write records and sync directories"):
            layouts = writer.layouts(plan.sources if talk.is_first else [])
            index, index_file = await _write_records(attempt.data, index, layouts, writer.written_nbytes)
            await each_in_thread(attempt.sync, attempt.directories(index.files))
        if request.options.verify_after_save:
            with trace.span("verify"):
                await _check_written(attempt.data, plan, index, index_file, writer.limit)
        if talk.is_first:
            shares = [_Share(index_file, request.local_data), *await talk.collect("write", _Share)]
            await in_thread(_check_seen, attempt.data, shares)
            timings = Timings(captured_seconds=captured_seconds, written_seconds=time.monotonic() - began)
            closing = _closing(shares, timings, request.metadata)
            with trace.span("commit"):
                await in_thread(attempt.publish, _manifest(attempt, plan, closing))
            await talk.tell("commit", closing)
        else:
            await talk.tell("write", _Share(index_file, request.local_data))
            closing = await talk.hear("commit", _Closing, after="write")
    except BaseException as error:
        reason = await tell_failure(talk, error)
        if attempt is not None:
            await clean_up(attempt.abandon)
        if reason is not None:
            raise reason from error
        raise
    await in_thread(trace.write, f"{attempt.id}-{talk.index}")
    return info(root, _manifest(attempt, plan, closing))


async def tell_failure(talk: Conversation, error: BaseException) -> PeerError | None:
    """Tell the other processes that this one failed, before their common data are removed.

    Returns why another one failed before, where that is known: an `error` may only follow from it.
    """
    await clean_up(talk.fail, ("begin", "commit") if talk.is_first else ("write",), error)
    return await talk.failure("commit") if isinstance(error, StorageError) else None


def _attempt(root: Location, request: Request, opening: Opening | None) -> _commit.Attempt:
    if opening is None:
        return _commit.Attempt(root, overwrite=request.overwrite)
    return _commit.Attempt(root, overwrite=request.overwrite, id=opening.attempt, created=opening.created)


def _plan(
    flat: _tree.Flat, kinds: list[str], nodes: list[Node], names: list[str], writer: Writer, data: Location
) -> _Plan:
    sources = {
        number: writer.source(number, _array_of(leaf, kind), data, f"arrays/{name}")
        for number, (leaf, kind, name) in enumerate(zip(flat.leaves, kinds, names, strict=True))
        if kind != "value"
    }
    leaves = [
        _leaf(leaf, kind, name, sources.get(number))
        for number, (leaf, kind, name) in enumerate(zip(flat.leaves, kinds, names, strict=True))
    ]
    return _Plan(nodes, leaves, list(sources.values()))


async def _begin(
    root: Location, attempt: _commit.Attempt, plan: _Plan, talk: Conversation, opening: Opening | None
) -> list[Source]:
    """Begin the attempt, or join it where the first process has begun; return what this process has to write."""
    if opening is None:
        await in_thread(attempt.begin)
        if talk.count > 1:
            elsewhere = [source.number for source in plan.sources if is_elsewhere(source.data)]
            digest_ = await in_thread(plan.digest)
            await talk.tell("begin", Opening(attempt.id, attempt.created, str(root), digest_, elsewhere))
        return plan.sources
    await in_thread(attempt.join)
    if await in_thread(plan.digest) != opening.tree:
        raise LeafMismatchError(
            f"the tree with {len(plan.leaves)} leaves that process {talk.index} saves to {root} is not the one that "
            f"process 0 saves to {opening.path}: paths, shapes, dtypes, shardings and Python values must be the same; "
            "numpy arrays may differ, those of process 0 are saved"
        )
    return shared_out(plan.sources, opening)


def shared_out(sources: Sequence[Source], opening: Opening) -> list[Source]:
    """What another process than the first takes part in writing."""
    elsewhere = set(opening.elsewhere)
    return [source for source in sources if not _is_local(source.data) or source.number in elsewhere]


def _is_local(data: Any) -> bool:
    """Whether every process has an array of its own, all but one of which are not saved."""
    return not isinstance(data, jax.Array) or data.is_fully_addressable


def is_elsewhere(data: Any) -> bool:
    """Whether one other process holds the array, which in its eyes is local."""
    return not _is_local(data) and len({device.process_index for device in data.sharding.device_set}) == 1


def _closing(shares: list[_Share], timings: Timings, metadata: dict[str, Any]) -> _Closing:
    local_data = [share.local_data for share in shares]
    given = any(data is not None for data in local_data)
    return _Closing([share.index for share in shares], timings, metadata, local_data if given else [])


def _links(base: Location | None, plan: _Plan, data: Location) -> Links | None:
    """What this process wrote of the leaves of `plan` in the checkpoint `base`; None where that is of no use."""
    if base is None or not (base.is_local and data.is_local):
        return None
    try:
        manifest = _commit.read(base)
        earlier, name = base.child(manifest.data), index_name()
        index = next(_commit.read_index(earlier, file) for file in manifest.indexes if file.name == name)
    except (CheckpointError, StopIteration):
        return None
    numbers = {leaf.name: number for number, leaf in enumerate(plan.leaves)}
    found = {
        (numbers[name], Slice(piece.start, piece.shape)): Known(index.files[piece.file], piece.offset, piece.hashes)
        for piece in index.pieces
        if piece.leaf < len(manifest.leaves)
        and piece.file < len(index.files)
        and (name := manifest.leaves[piece.leaf].name) in numbers
    }
    return Links(earlier, found, data)


def _check_seen(data: Location, shares: Sequence[_Share]) -> None:
    """What all processes have written; of a directory they have seen that it is one before."""
    for process, share in enumerate(shares):
        if process and not data.is_local:
            _commit.check_seen(data, process, share.index.name, share.index.nbytes)


def index_name() -> str:
    return f"index-{jax.process_index()}.json"


def _manifest(attempt: _commit.Attempt, plan: _Plan, closing: _Closing) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        attempt=attempt.id,
        created=attempt.created,
        versions={"jaxckpt": version("jaxckpt"), "jax": jax.__version__},
        tree=plan.nodes,
        leaves=plan.leaves,
        indexes=closing.indexes,
        timings=closing.timings,
        metadata=closing.metadata,
        local_data=closing.local_data,
    )


def _array_of(leaf: Any, kind: str) -> Any:
    match kind:
        case "key":
            return jax.random.key_data(leaf)
        case "scalar":
            return np.asarray(leaf)
        case _:
            return leaf


def _leaf(leaf: Any, kind: Any, name: str, source: Source | None) -> Leaf:
    if source is None:
        return Leaf(name=name, kind=kind, value=Value.of(leaf))
    return Leaf(
        name=name,
        kind=kind,
        shape=source.data.shape,
        dtype=name_of(source.data.dtype),
        chunk=source.layout.chunk if source.layout else None,
        sharding=describe(leaf.sharding) if isinstance(leaf, jax.Array) else None,
        impl=str(jax.random.key_impl(leaf)) if kind == "key" else None,
    )


async def _write_records(
    data: Location, index: Index, layouts: Iterable[Layout], written_nbytes: int
) -> tuple[Index, IndexFile]:
    """Write the `zarr.json` of every array, and the index that lists all files."""
    # Several at a time: a journal makes the syncs of many files durable by one write.
    metadata = await each_in_thread(partial(_write_metadata, data), layouts)
    index = Index(files=[*index.files, *metadata], pieces=index.pieces)
    encoded = await in_thread(encode_index, index)
    name = index_name()
    await in_thread(data.write, name, encoded)
    file = IndexFile(name=name, nbytes=len(encoded), hash=digest(encoded), written_nbytes=written_nbytes)
    return index, file


async def _check_written(data: Location, plan: _Plan, index: Index, index_file: IndexFile, limit: int) -> None:
    """Read back what this process has written, within `limit` bytes.

    Raises:
        CorruptCheckpointError: It is not what was written.
    """
    reader = Reader(limit, verify=True, memory_map=False, progress=Progress(0, None))
    stored = _reader.by_leaf([(index, data)], str(data))
    wanted = [
        Wanted(leaf.name, leaf.shape, dtype_named(leaf.dtype), (), stored[number])
        for number, leaf in enumerate(plan.leaves)
        if number in stored
    ]
    faults = await reader.find_faults(wanted)
    if faults:
        raise CorruptCheckpointError(f"nothing was saved, for it is not read as it was written: {faults[0].problem}")
    await in_thread(_commit.read_index, data, index_file)


def _write_metadata(data: Location, layout: Layout) -> File:
    name, metadata = f"{layout.name}/{_store.METADATA}", layout.metadata()
    layout.location.make()  # of an array whose every chunk another process writes
    data.write(name, metadata)
    return File(name=name, nbytes=len(metadata), hash=digest(metadata))
