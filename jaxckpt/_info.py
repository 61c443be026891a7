"""What a caller learns about a checkpoint from its manifest alone."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jaxckpt._errors import CorruptCheckpointError
from jaxckpt._location import Location
from jaxckpt._manifest import IndexFile, Leaf, Manifest, Node, dtype_named, from_json
from jaxckpt._tree import paths, unflatten


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        path: Where it is.
        format_version: Of the files; see the module `jaxckpt._manifest`.
        attempt: The unique id of the save that made it.
        created: When that save began, ISO 8601, UTC.
        versions: Of jaxckpt and JAX, which wrote it.
        leaves: One record a leaf, in the order of the tree.
        indexes: The index file of each process, in order: the hash that covers all pieces
            in it, and `written_nbytes`, the bytes of data that the process wrote.
        metadata: What was saved beside the tree.
        local_data: The same, of each process; empty where none had any.
        captured_seconds: From the beginning of the save until everything was captured.
        written_seconds: The same until all data were durable.
    """

    path: str
    format_version: int
    attempt: str
    created: str
    versions: dict[str, str]
    leaves: tuple[Leaf, ...]
    indexes: tuple[IndexFile, ...]
    metadata: dict[str, Any]
    local_data: list[Any]
    captured_seconds: float
    written_seconds: float
    _nodes: tuple[Node, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def tree(self) -> Any:
        """The saved tree, with a `jax.ShapeDtypeStruct` for every array and the value of every Python leaf."""
        nodes = list(self._nodes)
        paths(nodes, len(self.leaves), self.path)
        return unflatten(nodes, [stand_in(leaf) for leaf in self.leaves], self.path)


def info(root: Location, manifest: Manifest) -> CheckpointInfo:
    try:
        metadata, local_data = from_json(manifest.metadata), from_json(manifest.local_data)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{root}: the metadata is not what a save writes ({error})") from error
    return CheckpointInfo(
        path=str(root),
        format_version=manifest.format_version,
        attempt=manifest.attempt,
        created=manifest.created,
        versions=manifest.versions,
        leaves=tuple(manifest.leaves),
        indexes=tuple(manifest.indexes),
        metadata=metadata,
        local_data=local_data,
        captured_seconds=manifest.timings.captured_seconds,
        written_seconds=manifest.timings.written_seconds,
        _nodes=tuple(manifest.tree),
    )


def stand_in(leaf: Leaf) -> Any:
    """The leaf without its data: a `jax.ShapeDtypeStruct`, of a key dtype for PRNG keys, or the Python value.

    Raises:
        CorruptCheckpointError: A PRNG key is of a kind that JAX does not know, or its data are not of that kind.
    """
    if leaf.value is not None:
        return leaf.value.get()
    stored = jax.ShapeDtypeStruct(leaf.shape, dtype_named(leaf.dtype))
    if leaf.kind != "key":
        return stored
    try:
        key, data = _key_of(leaf.impl or "")
    except ValueError as error:
        raise CorruptCheckpointError(f"leaf {leaf.name}: {leaf.impl!r} is no PRNG that JAX knows") from error
    batch = leaf.shape[: len(leaf.shape) - len(data.shape)]
    if stored != jax.ShapeDtypeStruct((*batch, *data.shape), data.dtype):
        raise CorruptCheckpointError(f"leaf {leaf.name}: {stored} is not the data of {key.dtype} keys")
    return jax.ShapeDtypeStruct(batch, key.dtype)


@cache
def _key_of(impl: str) -> tuple[Any, Any]:
    """One PRNG key and its data, without either: to trace that anew for every leaf would take minutes."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return key, jax.eval_shape(jax.random.key_data, key)
