"""Arrays -> durable files: a tree becomes a published checkpoint, or each array a Zarr array of its own."""

import errno
import itertools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import jax
import msgspec
import numpy as np
from msgspec.structs import replace

from jaxckpt import _commit, _store, _tree
from jaxckpt._collector import paused_collector
from jaxckpt._errors import CheckpointExistsError, UnsupportedLeafError
from jaxckpt._info import CheckpointInfo, info
from jaxckpt._location import Location
from jaxckpt._manifest import (
    FORMAT_VERSION,
    ArrayAttributes,
    File,
    Index,
    IndexFile,
    Leaf,
    Manifest,
    Timings,
    Value,
    digest,
    encode_index,
    name_of,
)
from jaxckpt._options import SaveOptions
from jaxckpt._shards import describe
from jaxckpt._tasks import clean_up, in_thread
from jaxckpt._writer import Layout, Source, Writer

_ARRAY_FILE = re.compile(r"zarr\.json|c(\.\d+)*(_[0-9a-f]+\.__lock)?|\.zarr\.json\.[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Request:
    """How a public call wants to save. The last two are for our own callers.

    `copy_numpy` is whether numpy leaves may change while the save runs; `captured` is
    called when the caller may change, donate or delete everything it passed.
    """

    options: SaveOptions
    overwrite: bool
    on_progress: Callable[[int, int], None] | None = None
    copy_numpy: bool = True
    captured: Callable[[], None] = lambda: None

    def writer(self) -> Writer:
        return Writer(self.options, copy_numpy=self.copy_numpy, on_progress=self.on_progress)


async def save(root: Location, tree: Any, request: Request) -> CheckpointInfo:
    """Write `tree` as a checkpoint at `root`. It exists, durably, when this returns, and not before."""
    began = time.monotonic()
    with paused_collector():
        flat = _tree.flatten(tree)
        kinds = [_tree.kind_of(leaf, path) for leaf, path in zip(flat.leaves, flat.paths, strict=True)]
        nodes, names = _tree.nodes(flat), _tree.names(flat.paths)
    attempt = _commit.Attempt(root, overwrite=request.overwrite)
    captured_seconds = 0.0

    def captured() -> None:
        nonlocal captured_seconds
        captured_seconds = time.monotonic() - began
        request.captured()

    try:
        await in_thread(attempt.begin)
        writer = request.writer()
        sources = {
            number: writer.source(number, _array_of(leaf, kind), attempt.data, f"arrays/{name}")
            for number, (leaf, kind, name) in enumerate(zip(flat.leaves, kinds, names, strict=True))
            if kind != "value"
        }
        index = await writer.write(list(sources.values()), attempt.data, captured)
        index, index_file = await in_thread(_write_records, attempt.data, index, writer.layouts(sources.values()))
        timings = Timings(captured_seconds=captured_seconds, written_seconds=time.monotonic() - began)
        with paused_collector():
            leaves = [
                _leaf(leaf, kind, name, sources.get(number))
                for number, (leaf, kind, name) in enumerate(zip(flat.leaves, kinds, names, strict=True))
            ]
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            attempt=attempt.id,
            created=attempt.created,
            versions={"jaxckpt": version("jaxckpt"), "jax": jax.__version__},
            tree=nodes,
            leaves=leaves,
            indexes=[index_file],
            timings=timings,
        )
        await in_thread(attempt.publish, manifest, _directories(attempt.data, index))
    except BaseException:
        await clean_up(attempt.abandon)
        raise
    return info(root, manifest)


async def save_arrays(
    targets: Sequence[Location], arrays: Sequence[Any], labels: Sequence[str], request: Request
) -> None:
    """Write each array as a plain Zarr array at its target. All are durable when this returns.

    Chunks are written first; an array exists when its `zarr.json` does, which is put last.
    """
    for array, label in zip(arrays, labels, strict=True):
        if _tree.kind_of(array, (label,)) not in ("array", "numpy"):
            raise UnsupportedLeafError(
                f"array {label} is of type {type(array).__qualname__}; expected a JAX or numpy array"
            )
    new_entries = await in_thread(_claim, targets, overwrite=request.overwrite)
    try:
        writer = request.writer()
        sources = [
            writer.source(number, array, target, "", packable=False)
            for number, (target, array) in enumerate(zip(targets, arrays, strict=True))
        ]
        index = await writer.write(sources, None, request.captured)
        await in_thread(_commit_arrays, targets, sources, index, new_entries)
    except BaseException:
        await clean_up(_discard_unfinished, targets)
        raise


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


def _write_records(data: Location, index: Index, layouts: Iterable[Layout]) -> tuple[Index, IndexFile]:
    """Write the `zarr.json` of every array, and the index that lists all files."""
    files = list(index.files)
    for layout in layouts:
        name, metadata = f"{layout.name}/{_store.METADATA}", layout.metadata()
        data.write(name, metadata)
        files.append(File(name=name, nbytes=len(metadata), hash=digest(metadata)))
    index = Index(files=files, pieces=index.pieces)
    encoded = encode_index(index)
    name = f"index-{jax.process_index()}.json"
    data.write(name, encoded)
    return index, IndexFile(name=name, nbytes=len(encoded), hash=digest(encoded))


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


def _commit_arrays(
    targets: Sequence[Location], sources: Sequence[Source], index: Index, new_entries: Sequence[str]
) -> None:
    for target, source in zip(targets, sources, strict=True):
        assert source.layout is not None
        written = _part_of(index, source)
        attributes = ArrayAttributes(
            format_version=FORMAT_VERSION,
            dtype=source.layout.dtype.name,
            files=written.files,
            pieces=written.pieces,
        )
        target.sync([*new_entries, target.path])
        target.put(_store.METADATA, source.layout.metadata({"jaxckpt": msgspec.to_builtins(attributes)}), replaces=None)


def _part_of(index: Index, source: Source) -> Index:
    """What `index` holds of one array, as an index of that array alone."""
    numbers = {number: None for piece in index.pieces if piece.leaf == source.number for number in [piece.file]}
    renumbered = {number: position for position, number in enumerate(numbers)}
    files = [replace(index.files[number], name=PurePosixPath(index.files[number].name).name) for number in numbers]
    pieces = [
        replace(piece, leaf=0, file=renumbered[piece.file]) for piece in index.pieces if piece.leaf == source.number
    ]
    return Index(files=files, pieces=pieces)
