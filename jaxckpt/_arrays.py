"""Arrays <-> durable files, each array a plain Zarr array of its own: what `async_serialize` is made of."""

import errno
import itertools
import re
import uuid
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import jax
import msgspec
from msgspec.structs import replace

from jaxckpt import _commit, _reader, _restore, _save, _store, _tree
from jaxckpt._errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    UnsupportedLeafError,
)
from jaxckpt._location import Location
from jaxckpt._manifest import (
    FORMAT_VERSION,
    ArrayAttributes,
    ArrayIndex,
    Box,
    Index,
    Leaf,
    decode_array_index,
    digest,
    encode_array_index,
    name_of,
)
from jaxckpt._reader import Stored
from jaxckpt._tasks import clean_up, in_thread
from jaxckpt._trace import Trace
from jaxckpt._writer import Source

_ARRAY_FILE = re.compile(r"zarr\.json|index-\d+\.json|c(\.\d+)*(_[0-9a-f]+\.__lock)?|\.zarr\.json\.[0-9a-f]{32}")
_INDEX = re.compile(r"index-\d+\.json")


async def save_arrays(
    targets: Sequence[Location], arrays: Sequence[Any], labels: Sequence[str], request: _save.Request
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
        reason = await _save.tell_failure(talk, error)
        if claimed and talk.is_first:
            await clean_up(_discard_unfinished, targets)
        if reason is not None:
            raise reason from error
        raise


async def _claim_together(
    targets: Sequence[Location], sources: Sequence[Source], request: _save.Request
) -> tuple[str, list[Source], list[str]]:
    """Claim the targets, by the first process, and agree on the attempt.

    Returns its id, what this process writes, and the directories that got a new entry.
    """
    talk = request.conversation
    layouts = [source.layout for source in sources if source.layout]
    described = digest(msgspec.json.encode([(layout.shape, layout.dtype.name, layout.chunk) for layout in layouts]))
    if talk.is_first:
        new_entries = await in_thread(_claim, targets, overwrite=request.overwrite)
        elsewhere = [source.number for source in sources if _save.is_elsewhere(source.data)]
        opening = _save.Opening(uuid.uuid4().hex, "", str(targets[0]) if targets else "", described, elsewhere)
        await talk.tell("begin", opening)
        return opening.attempt, list(sources), new_entries
    opening = await talk.hear("begin", _save.Opening)
    if opening.tree != described:
        raise LeafMismatchError(
            f"process {talk.index} serializes other arrays than process 0 (whose first path is {opening.path}): "
            "their number, shapes and dtypes must be the same in all processes"
        )
    return opening.attempt, _save.shared_out(sources, opening), []


async def restore_arrays(
    places: Sequence[Location], likes: Sequence[Any], labels: Sequence[str], request: _restore.Request
) -> list[Any]:
    """The Zarr array at each place, onto what the matching `like` asks for."""
    wants: list[_restore.Want] = []
    pieces: dict[int, list[Stored]] = {}
    for number, (location, like, label) in enumerate(zip(places, likes, labels, strict=True)):
        leaf, indexes = await in_thread(_read_array_metadata, location)
        wants.append(_restore.want_of(number, leaf, like, label, request))
        pieces[number] = _reader.by_leaf([(index, location) for index in indexes], str(location))[0]
    values = await _restore.read_all(wants, pieces, request)
    return [values[number] for number in range(len(places))]


class _Written(msgspec.Struct, frozen=True):
    """An index file that a process has written beside the chunks of array `number`: proof that storage is shared."""

    number: int
    file: str
    nbytes: int


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
            file, encoded = _save.index_name(), encode_array_index(part)
            target.write(file, encoded)
            target.sync([target.path])
            written.append(_Written(source.number, file, len(encoded)))
    if targets:
        targets[0].sync(dict.fromkeys([*new_entries, *(target.path for target in targets)]))
    return written


def _check_seen(targets: Sequence[Location], written: Sequence[Sequence[_Written]]) -> None:
    for process, files in enumerate(written, start=1):
        for file in files:
            _commit.check_seen(targets[file.number], process, file.file, file.nbytes)


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


def _read_array_metadata(location: Location) -> tuple[Leaf, list[Index]]:
    """The array that `async_serialize` left at `location`, as a leaf and the indexes of its pieces."""
    where = f"{location}/{_store.METADATA}"
    try:
        found = msgspec.json.decode(location.read(_store.METADATA), type=_ZarrArray)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(errno.ENOENT, f"no array: there is no {_store.METADATA}", str(location)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{where}: not an array that jaxckpt wrote ({error}); open others with zarr or tensorstore"
        ) from error
    ours = found.attributes.jaxckpt
    if ours.format_version != FORMAT_VERSION:
        raise CorruptCheckpointError(f"{where}: format version {ours.format_version}; expected {FORMAT_VERSION}")
    names = sorted(name for name in location.names() or [] if _INDEX.fullmatch(name))
    indexes = [decode_array_index(location.read(name), f"{location}/{name}") for name in names]
    if not indexes:
        raise CorruptCheckpointError(f"{location}: the index file of the array is missing")
    for name, index in zip(names, indexes, strict=True):
        if index.attempt != ours.attempt:
            raise CorruptCheckpointError(f"{location}/{name}: it belongs to another array than {where}")
        if (index.shape, index.dtype) != (found.shape, indexes[0].dtype):
            raise CorruptCheckpointError(
                f"{where}: shape {found.shape}, but {name} says {index.dtype}{index.shape}; it was altered"
            )
    try:
        leaf = Leaf(name=str(location), kind="array", shape=found.shape, dtype=indexes[0].dtype)
    except ValueError as error:
        raise CorruptCheckpointError(f"{location}: not an array ({error})") from error
    return leaf, [Index(files=index.files, pieces=index.pieces) for index in indexes]


class _Attributes(msgspec.Struct):
    jaxckpt: ArrayAttributes


class _ZarrArray(msgspec.Struct):
    """The part of a `zarr.json` that matters to us."""

    shape: Box
    attributes: _Attributes
