"""Arrays -> durable files: a tree becomes a published checkpoint, or each array a Zarr array of its own."""

import errno
import itertools
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import jax
import msgspec
import numpy as np
from msgspec.structs import replace

from jaxckpt import _commit, _store, _tree
from jaxckpt._collector import paused_collector
from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    LeafMismatchError,
    PeerError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt._info import CheckpointInfo, info
from jaxckpt._links import Known, Links
from jaxckpt._location import Location
from jaxckpt._manifest import (
    FORMAT_VERSION,
    ArrayAttributes,
    ArrayIndex,
    File,
    Index,
    IndexFile,
    Leaf,
    Manifest,
    Node,
    Timings,
    Value,
    digest,
    encode_array_index,
    encode_index,
    name_of,
)
from jaxckpt._options import SaveOptions
from jaxckpt._processes import Conversation
from jaxckpt._shards import Slice, describe
from jaxckpt._store import Layout
from jaxckpt._tasks import clean_up, each_in_thread, in_thread
from jaxckpt._trace import Trace
from jaxckpt._writer import Source, Writer

_ARRAY_FILE = re.compile(r"zarr\.json|index-\d+\.json|c(\.\d+)*(_[0-9a-f]+\.__lock)?|\.zarr\.json\.[0-9a-f]{32}")


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


class _Opening(msgspec.Struct, frozen=True):
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
        opening = None if talk.is_first else await talk.hear("begin", _Opening)
        attempt = _attempt(root, request, opening)
        writer = request.writer(trace)
        with trace.span("begin"):
            with paused_collector():
                plan = _plan(flat, kinds, nodes, names, writer, attempt.data)
            ours = await _begin(root, attempt, plan, talk, opening)
            links = await in_thread(_links, request.base, plan, attempt.data) if request.base else None
        index = await writer.write(ours, attempt.data, captured, links)
        with trace.span("write records and sync directories"):
            layouts = writer.layouts(plan.sources if talk.is_first else [])
            index, index_file = await _write_records(attempt.data, index, layouts, writer.written_nbytes)
            await each_in_thread(attempt.sync, [*_directories(attempt.data, index), *attempt.directories()])
        if talk.is_first:
            shares = [_Share(index_file, request.local_data), *await talk.collect("write", _Share)]
            timings = Timings(captured_seconds=captured_seconds, written_seconds=time.monotonic() - began)
            closing = _closing(shares, timings, request.metadata)
            with trace.span("commit"):
                await in_thread(attempt.publish, _manifest(attempt, plan, closing))
            await talk.tell("commit", closing)
        else:
            await talk.tell("write", _Share(index_file, request.local_data))
            closing = await talk.hear("commit", _Closing, after="write")
    except BaseException as error:
        reason = await _tell_failure(talk, error)
        if attempt is not None:
            await clean_up(attempt.abandon)
        if reason is not None:
            raise reason from error
        raise
    await in_thread(trace.write, f"{attempt.id}-{talk.index}")
    return info(root, _manifest(attempt, plan, closing))


async def _tell_failure(talk: Conversation, error: BaseException) -> PeerError | None:
    """Tell the other processes that this one failed, before their common data are removed.

    Returns why another one failed before, where that is known: an `error` may only follow from it.
    """
    await clean_up(talk.fail, ("begin", "commit") if talk.is_first else ("write",), error)
    return await talk.failure("commit") if isinstance(error, StorageError) else None


def _attempt(root: Location, request: Request, opening: _Opening | None) -> _commit.Attempt:
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
    root: Location, attempt: _commit.Attempt, plan: _Plan, talk: Conversation, opening: _Opening | None
) -> list[Source]:
    """Begin the attempt, or join it where the first process has begun; return what this process has to write."""
    if opening is None:
        await in_thread(attempt.begin)
        if talk.count > 1:
            elsewhere = [source.number for source in plan.sources if _is_elsewhere(source.data)]
            digest_ = await in_thread(plan.digest)
            await talk.tell("begin", _Opening(attempt.id, attempt.created, str(root), digest_, elsewhere))
        return plan.sources
    await in_thread(attempt.join)
    if await in_thread(plan.digest) != opening.tree:
        raise LeafMismatchError(
            f"the tree with {len(plan.leaves)} leaves that process {talk.index} saves to {root} is not the one that "
            f"process 0 saves to {opening.path}: paths, shapes, dtypes, shardings and Python values must be the same; "
            "numpy arrays may differ, those of process 0 are saved"
        )
    return _shared_out(plan.sources, opening)


def _shared_out(sources: Sequence[Source], opening: _Opening) -> list[Source]:
    """What another process than the first takes part in writing."""
    elsewhere = set(opening.elsewhere)
    return [source for source in sources if not _is_local(source.data) or source.number in elsewhere]


def _is_local(data: Any) -> bool:
    """Whether every process has an array of its own, all but one of which are not saved."""
    return not isinstance(data, jax.Array) or data.is_fully_addressable


def _is_elsewhere(data: Any) -> bool:
    """Whether one other process holds the array, which in its eyes is local."""
    return not _is_local(data) and len({device.process_index for device in data.sharding.device_set}) == 1


def _closing(shares: list[_Share], timings: Timings, metadata: dict[str, Any]) -> _Closing:
    local_data = [share.local_data for share in shares]
    given = any(data is not None for data in local_data)
    return _Closing([share.index for share in shares], timings, metadata, local_data if given else [])


def _links(base: Location, plan: _Plan, data: Location) -> Links | None:
    """What this process wrote of the leaves of `plan` in the checkpoint `base`; None where that cannot be read."""
    try:
        manifest = _commit.read(base)
        earlier, name = base.child(manifest.data), _index_name()
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


def _index_name() -> str:
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


class _Written(msgspec.Struct, frozen=True):
    """An index file that a process has written beside the chunks of array `number`: proof that storage is shared."""

    number: int
    file: str
    nbytes: int


async def save_arrays(
    targets: Sequence[Location], arrays: Sequence[Any], labels: Sequence[str], request: Request
) -> None:
    """Write each array as a plain Zarr array at its target. All are durable when this returns.

    Chunks are written first; an array exists when its `zarr.json` does, which is put last.
    """
    talk = request.conversation
    trace = Trace(request.options.trace_directory)
    claimed = False
    try:
        for array, label in zip(arrays, labels, strict=True):
            if _tree.kind_of(array, (label,)) not in ("array", "numpy"):
                raise UnsupportedLeafError(
                    f"array {label} is of type {type(array).__qualname__}; expected a JAX or numpy array"
                )
        writer = request.writer(trace)
        sources = [
            writer.source(number, array, target, "", packable=False)
            for number, (target, array) in enumerate(zip(targets, arrays, strict=True))
        ]
        attempt, ours, new_entries = await _claim_together(targets, sources, request)
        claimed = True
        index = await writer.write(ours, None, request.captured)
        written = await in_thread(_write_array_indexes, targets, sources, index, attempt, new_entries)
        if talk.is_first:
            await in_thread(_check_seen, targets, await talk.collect("write", list[_Written]))
            await in_thread(_commit_arrays, targets, sources, attempt)
            await talk.tell("commit", None)
        else:
            await talk.tell("write", written[:1])
            await talk.hear("commit", type(None), after="write")
        await in_thread(trace.write, f"{attempt}-{talk.index}")
    except BaseException as error:
        reason = await _tell_failure(talk, error)
        if claimed and talk.is_first:
            await clean_up(_discard_unfinished, targets)
        if reason is not None:
            raise reason from error
        raise


async def _claim_together(
    targets: Sequence[Location], sources: Sequence[Source], request: Request
) -> tuple[str, list[Source], list[str]]:
    """Claim the targets, by the first process, and agree on the attempt.

    Returns its id, what this process writes, and the directories that got a new entry.
    """
    talk = request.conversation
    layouts = [source.layout for source in sources if source.layout]
    described = digest(msgspec.json.encode([(layout.shape, layout.dtype.name, layout.chunk) for layout in layouts]))
    if talk.is_first:
        new_entries = await in_thread(_claim, targets, overwrite=request.overwrite)
        elsewhere = [source.number for source in sources if _is_elsewhere(source.data)]
        opening = _Opening(uuid.uuid4().hex, "", str(targets[0]) if targets else "", described, elsewhere)
        await talk.tell("begin", opening)
        return opening.attempt, list(sources), new_entries
    opening = await talk.hear("begin", _Opening)
    if opening.tree != described:
        raise LeafMismatchError(
            f"process {talk.index} serializes other arrays than process 0 (whose first path is {opening.path}): "
            "their number, shapes and dtypes must be the same in all processes"
        )
    return opening.attempt, _shared_out(sources, opening), []


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
    name = _index_name()
    await in_thread(data.write, name, encoded)
    file = IndexFile(name=name, nbytes=len(encoded), hash=digest(encoded), written_nbytes=written_nbytes)
    return index, file


def _write_metadata(data: Location, layout: Layout) -> File:
    name, metadata = f"{layout.name}/{_store.METADATA}", layout.metadata()
    layout.location.make()  # of an array whose every chunk another process writes
    data.write(name, metadata)
    return File(name=name, nbytes=len(metadata), hash=digest(metadata))


def _directories(data: Location, index: Index) -> list[str]:
    """Every directory below `data` that holds a file or a directory of this save."""
    parents = {str(parent) for file in index.files for parent in PurePosixPath(file.name).parents}
    return [data.child(parent).path for parent in sorted(parents - {"."})]


def _claim(targets: Sequence[Location], *, overwrite: bool) -> list[str]:
    """Check every target, then make their directories, removing what stood there.

    Returns the directories that got a new entry.
    """
    _check_apart(targets)
    stale = [(target, _stale_files(target, overwrite=overwrite)) for target in targets]
    for target, names in stale:
        for name in names:
            target.unlink(name)
    return [entry for target in targets for entry in target.make()]


def _check_apart(targets: Sequence[Location]) -> None:
    ordered = sorted(targets, key=lambda target: target.real_path.split("/"))
    for outer, inner in itertools.pairwise(ordered):
        if inner.real_path == outer.real_path:
            raise ValueError(f"two arrays have the same path; every array needs a path of its own ({outer}, {inner})")
        if inner.real_path.startswith(f"{outer.real_path}/"):
            raise ValueError(f"{inner} is inside of {outer}, the path of another array; every array needs its own")


def _stale_files(target: Location, *, overwrite: bool) -> list[str]:
    """The files of the array at `target`, or of an unfinished one: its commit, `zarr.json`, first."""
    found = target.names() or []
    foreign = sorted(name for name in found if not (_ARRAY_FILE.fullmatch(name) and target.is_file(name)))
    if foreign:
        raise CheckpointExistsError(
            errno.EEXIST,
            f"the directory holds other files ({', '.join(foreign[:3])}); choose an empty one",
            str(target),
        )
    if _store.METADATA in found and not overwrite:
        raise CheckpointExistsError(errno.EEXIST, "an array is there already; overwrite=True replaces it", str(target))
    return sorted(found, key=lambda name: name != _store.METADATA)


def _discard_unfinished(targets: Sequence[Location]) -> None:
    """Remove the chunks of arrays that were not committed, and their directories where that empties them."""
    for target in targets:
        found = target.names() or []
        if _store.METADATA not in found and all(_ARRAY_FILE.fullmatch(name) for name in found):
            target.remove()


def _write_array_indexes(
    targets: Sequence[Location], sources: Sequence[Source], index: Index, attempt: str, new_entries: Sequence[str]
) -> list[_Written]:
    """Write the index of this process for every array that it has written to, and make all directories durable.

    The first process has one for every array: it says what the array is.
    """
    written: list[_Written] = []
    for target, source in zip(targets, sources, strict=True):
        part = _part_of(index, source, attempt)
        if part.pieces or jax.process_index() == 0:
            file, encoded = _index_name(), encode_array_index(part)
            target.write(file, encoded)
            target.sync([target.path])
            written.append(_Written(source.number, file, len(encoded)))
    if targets:
        targets[0].sync(dict.fromkeys([*new_entries, *(target.path for target in targets)]))
    return written


def _check_seen(targets: Sequence[Location], written: Sequence[Sequence[_Written]]) -> None:
    for process, files in enumerate(written, start=1):
        for file in files:
            target = targets[file.number]
            try:
                target.check_size(file.file, file.nbytes)
            except CheckpointError as error:
                raise StorageError(
                    errno.ENOENT,
                    f"process {process} has written {file.file} there, which process 0 does not see; "
                    "all processes must use one path on storage that they share, not on a disk of their own",
                    str(target),
                ) from error


def _commit_arrays(targets: Sequence[Location], sources: Sequence[Source], attempt: str) -> None:
    attributes = msgspec.to_builtins(ArrayAttributes(format_version=FORMAT_VERSION, attempt=attempt))
    for target, source in zip(targets, sources, strict=True):
        assert source.layout is not None
        target.put(_store.METADATA, source.layout.metadata({"jaxckpt": attributes}), replaces=None)


def _part_of(index: Index, source: Source, attempt: str) -> ArrayIndex:
    """What `index` holds of one array, as an index of that array alone."""
    assert source.layout is not None
    numbers = {number: None for piece in index.pieces if piece.leaf == source.number for number in [piece.file]}
    renumbered = {number: position for position, number in enumerate(numbers)}
    files = [replace(index.files[number], name=PurePosixPath(index.files[number].name).name) for number in numbers]
    pieces = [
        replace(piece, leaf=0, file=renumbered[piece.file]) for piece in index.pieces if piece.leaf == source.number
    ]
    return ArrayIndex(
        attempt=attempt,
        shape=source.layout.shape,
        dtype=name_of(source.layout.dtype),
        files=files,
        pieces=pieces,
    )
