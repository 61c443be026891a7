"""Durable files -> arrays: the mirror of `_save`."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxckpt import _commit, _reader, _tree
from jaxckpt._budget import Budget, Progress, default_host_bytes
from jaxckpt._collector import paused_collector
from jaxckpt._errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
)
from jaxckpt._info import CheckpointInfo, info, stand_in
from jaxckpt._location import Location
from jaxckpt._manifest import (
    Leaf,
    Manifest,
    dtype_named,
)
from jaxckpt._options import MIB, RestoreOptions
from jaxckpt._reader import Boxes, Reader, Stored, Wanted
from jaxckpt._shards import Slice, blocks, whole
from jaxckpt._tasks import Tasks, in_thread
from jaxckpt._transfer import Placement, Target, blank, can_fill, is_of_jax, join, place, put_part

_BATCH_BYTES = 64 * MIB
_BATCH_LEAVES = 65536
_HAS_DTYPE = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


@dataclass(frozen=True, slots=True)
class Request:
    """How a public call wants to restore. `placement` is what the caller's thread says about devices."""

    options: RestoreOptions
    placement: Placement
    on_progress: Callable[[int, int], None] | None = None


class Want(msgspec.Struct, frozen=True, gc=False):
    """A stored leaf and what it is to become.

    `target` is set for a jax.Array, None for numpy. `dtype` differs from the stored one
    only by a cast that was asked for. `key_sharding` is where a PRNG key array goes once it is made.
    """

    number: int
    leaf: Leaf
    target: Target | None
    dtype: np.dtype[Any]
    key_sharding: Sharding | None = None

    @property
    def boxes(self) -> list[Slice]:
        return [whole(self.leaf.shape)] if self.target is None else self.target.boxes()


def describe(root: Location) -> CheckpointInfo:
    """What the manifest says of the checkpoint at `root`; nothing else is read."""
    return info(root, _commit.read(root))


async def restore(root: Location, like: Any, request: Request) -> Any:
    """The tree of the checkpoint at `root`, as it was or as `like` asks for (None: as it was).

    A checkpoint that is overwritten meanwhile is read again from its new beginning.
    """
    while True:
        manifest = await in_thread(_commit.read, root)
        try:
            return await _restore(root, manifest, like, request)
        except (CorruptCheckpointError, CheckpointNotFoundError):
            if await in_thread(_commit.is_current, root, manifest):
                raise


async def _restore(root: Location, manifest: Manifest, like: Any, request: Request) -> Any:
    with paused_collector():
        paths = _tree.paths(manifest.tree, len(manifest.leaves), str(root))
        treedef, asked = _asked_for(manifest, paths, like, request)
        values: dict[int, Any] = {
            number: _python_value(manifest.leaves[number], wish, paths[number], request.options)
            for number, wish in asked
            if manifest.leaves[number].kind == "value"
        }
        wants = [
            want_of(number, manifest.leaves[number], wish, _tree.display(paths[number]), request)
            for number, wish in asked
            if number not in values
        ]
    data = root.child(manifest.data)
    indexes = [(await in_thread(_commit.read_index, data, file), data) for file in manifest.indexes]
    values |= await read_all(wants, _reader.by_leaf(indexes, str(root)), request)
    if treedef is None:
        return _tree.unflatten(manifest.tree, [values[number] for number in range(len(paths))], str(root))
    return jax.tree_util.tree_unflatten(treedef, [values[number] for number, _ in asked])


def _asked_for(
    manifest: Manifest, paths: Sequence[_tree.Path], like: Any, request: Request
) -> tuple[Any, list[tuple[int, Any]]]:
    """Which saved leaf each leaf of `like` is, in its order, and what it asks for; all of them as they were for None.

    Raises:
        LeafMismatchError: `like` names a leaf that was not saved, or leaves one out
            although `partial` is not set.
    """
    if like is None:
        return None, [(number, None) for number in range(len(paths))]
    flat = _tree.flatten(like)
    numbers = {path: number for number, path in enumerate(paths)}
    missing = [path for path in flat.paths if path not in numbers]
    if missing:
        raise LeafMismatchError(
            f"leaf {_tree.display(missing[0])} is in `like` but not in the checkpoint{_others(missing)}; "
            f"the checkpoint has {len(paths)} leaves{_closest(missing[0], paths)}"
        )
    asked = set(flat.paths)
    if not request.options.partial and (surplus := [path for path in paths if path not in asked]):
        raise LeafMismatchError(
            f"leaf {_tree.display(surplus[0])} is in the checkpoint but not in `like`{_others(surplus)}; "
            "add it, or pass RestoreOptions(partial=True) to restore a part of the tree"
        )
    return flat.treedef, [(numbers[path], wish) for path, wish in zip(flat.paths, flat.leaves, strict=True)]


def _others(paths: Sequence[_tree.Path]) -> str:
    return f" (nor are {len(paths) - 1} others)" if len(paths) > 1 else ""


def _closest(path: _tree.Path, paths: Sequence[_tree.Path]) -> str:
    found = difflib.get_close_matches(
        _tree.display(path), [_tree.display(saved) for saved in paths[:1000]], n=1, cutoff=0
    )
    return f", the closest is {found[0]}" if found else ""


def _python_value(leaf: Leaf, wish: Any, path: _tree.Path, options: RestoreOptions) -> Any:
    assert leaf.value is not None
    value: Any = leaf.value.get()
    if wish is None or type(wish) is type(value):
        return value
    try:
        if options.cast and isinstance(wish, bool | int | float | complex | str):
            return type(wish)(value)
    except (ValueError, TypeError, OverflowError):
        pass
    raise LeafMismatchError(
        f"leaf {_tree.display(path)}: `like` asks for {type(wish).__name__}, the checkpoint has a "
        f"Python {type(value).__name__}; put a {type(value).__name__} into `like`"
    )


def want_of(number: int, leaf: Leaf, wish: Any, label: str, request: Request) -> Want:
    """What the stored array `leaf` is to become.

    Raises:
        LeafMismatchError: It is not what `wish` asks for.
    """
    stored = stand_in(leaf) if leaf.kind == "key" else None
    shape, dtype = (stored.shape, stored.dtype) if stored is not None else (leaf.shape, dtype_named(leaf.dtype))
    if isinstance(wish, _HAS_DTYPE):
        _check_same(label, wish, shape, dtype, cast=request.options.cast)
    elif not (wish is None or isinstance(wish, Sharding)):
        raise LeafMismatchError(
            f"leaf {label}: `like` asks for {type(wish).__name__}, the checkpoint has an array of "
            f"{dtype}{list(shape)}; put an array, a jax.ShapeDtypeStruct or a Sharding into `like`"
        )
    wanted = np.dtype(wish.dtype) if isinstance(wish, _HAS_DTYPE) and stored is None else dtype
    if isinstance(wish, np.ndarray | np.generic) or (wish is None and leaf.kind in ("numpy", "scalar")):
        return Want(number, leaf, None, wanted)
    sharding = _sharding_of(wish)
    if sharding is not None:
        _check_divides(label, sharding, shape)
    if stored is not None:
        # A named sharding puts the data where it puts the keys; others say nothing of the last axis.
        direct = isinstance(sharding, NamedSharding)
        data = Target(leaf.shape, dtype_named(leaf.dtype), sharding if direct else None)
        return Want(number, leaf, data, data.dtype, key_sharding=None if direct else sharding)
    if not is_of_jax(wanted):
        raise LeafMismatchError(f"leaf {label} is {wanted}, of which JAX has no arrays; put a numpy array into `like`")
    if not request.placement.holds(wanted):
        raise LeafMismatchError(
            f"leaf {label} is {wanted}, which JAX would narrow to 32 bits; set jax_enable_x64, put a numpy array "
            "into `like`, or pass RestoreOptions(cast=True) with the dtype that you want"
        )
    return Want(number, leaf, Target(leaf.shape, wanted, sharding), wanted)


def _check_same(label: str, wish: Any, shape: tuple[int, ...], dtype: Any, *, cast: bool) -> None:
    if tuple(wish.shape) != tuple(shape):
        raise LeafMismatchError(f"leaf {label}: `like` has shape {tuple(wish.shape)}, the checkpoint {tuple(shape)}")
    if wish.dtype == dtype:
        return
    is_key = any(jnp.issubdtype(side, jax.dtypes.prng_key) for side in (wish.dtype, dtype))
    if is_key or not cast:
        raise LeafMismatchError(
            f"leaf {label}: `like` has dtype {wish.dtype}, the checkpoint {dtype}; "
            "change `like`, or pass RestoreOptions(cast=True) to convert"
        )


def _check_divides(label: str, sharding: Sharding, shape: tuple[int, ...]) -> None:
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:
        raise LeafMismatchError(
            f"leaf {label}: the sharding in `like` does not fit its shape {shape}: {error}"
        ) from error


def _sharding_of(wish: Any) -> Sharding | None:
    """Where an array is asked for; None, the default device, also for an array that is bound to no device."""
    if isinstance(wish, jax.Array):
        return wish.sharding if wish.committed else None
    return wish if wish is None or isinstance(wish, Sharding) else wish.sharding


async def read_all(wants: Sequence[Want], pieces: dict[int, list[Stored]], request: Request) -> dict[int, Any]:
    """Read and place everything, in batches that overlap within the budget."""
    limit = request.options.max_host_bytes or default_host_bytes()
    restoring = _Restoring(request, pieces, limit, sum(want.leaf.nbytes for want in wants))
    taken: dict[str, int] = {}
    with paused_collector():
        for want in wants:
            stored = pieces.get(want.number, ())
            _reader.check(want.leaf.name, want.leaf.shape, dtype_named(want.leaf.dtype), stored, taken)
    await in_thread(_reader.check_files, [(want.leaf.name, pieces.get(want.number, ())) for want in wants])
    async with Tasks() as tasks:
        for batch in _batches(wants, min(_BATCH_BYTES, limit // 4)):
            await restoring.start(batch, tasks)
    return restoring.values


def _batches(wants: Sequence[Want], most_bytes: int) -> Iterator[list[Want]]:
    """Runs of leaves: many small ones together, to be placed by one call, a large one alone."""
    batch: list[Want] = []
    nbytes = 0
    for want in wants:
        if batch and (nbytes + want.leaf.nbytes > most_bytes or len(batch) == _BATCH_LEAVES):
            yield batch
            batch, nbytes = [], 0
        batch.append(want)
        nbytes += want.leaf.nbytes
    if batch:
        yield batch


class _Restoring:
    """The restore of many leaves: half of the budget is for scratch memory, half for what waits for its device."""

    def __init__(self, request: Request, pieces: dict[int, list[Stored]], limit: int, total: int) -> None:
        options = request.options
        self._placement = request.placement
        self._pieces = pieces
        self._reader = Reader(
            limit // 2,
            verify=options.verify,
            memory_map=options.memory_map,
            progress=Progress(total, request.on_progress),
        )
        self._waiting = Budget(limit // 2)
        self.values: dict[int, Any] = {}

    async def start(self, batch: list[Want], tasks: Tasks) -> None:
        """Begin a batch as a task, once the host memory that it needs is free."""
        held = sum(want.leaf.nbytes for want in batch if not self._stays_on_host(want))
        if len(batch) == 1 and held > self._waiting.limit and batch[0].target and can_fill(batch[0].target):
            tasks.create_task(self._stream(batch[0], batch[0].target))
            return
        await self._waiting.acquire(held)
        tasks.create_task(self._restore(batch, held))

    def _stays_on_host(self, want: Want) -> bool:
        return want.target is None or self._placement.shares_host_memory(want.target.sharding)

    async def _restore(self, batch: list[Want], held: int) -> None:
        try:
            hosts = await self._reader.read([self._wanted(want, want.boxes) for want in batch])
            self.values |= await in_thread(_finish, batch, hosts, self._placement)
        finally:
            self._waiting.release(held)

    async def _stream(self, want: Want, target: Target) -> None:
        """Fill the shards of an array that is larger than the budget part by part."""
        part_bytes = self._waiting.limit // 2
        itemsize = dtype_named(want.leaf.dtype).itemsize
        shards = await in_thread(blank, target, self._placement)
        for box in target.boxes():
            for block in blocks(box.shape, itemsize, part_bytes):
                part = block.slice.shifted(box.start)
                async with self._waiting.reserve(block.nbytes):
                    (host,) = await self._reader.read([self._wanted(want, [part])])
                    data = host[part].astype(want.dtype, copy=False)
                    await in_thread(put_part, shards, target, part, data, self._placement)
        self.values[want.number] = join(shards, target)

    def _wanted(self, want: Want, boxes: Sequence[Slice]) -> Wanted:
        leaf = want.leaf
        return Wanted(leaf.name, leaf.shape, dtype_named(leaf.dtype), boxes, self._pieces.get(want.number, ()))


@paused_collector()
def _finish(batch: Sequence[Want], hosts: Sequence[Boxes], placement: Placement) -> dict[int, Any]:
    """Turn host arrays into what was wanted, all jax.Arrays of the batch with one call."""
    cast = [
        {box: array.astype(want.dtype, copy=False) for box, array in boxes.items()}
        for want, boxes in zip(batch, hosts, strict=True)
    ]
    on_device = [(want, want.target, boxes) for want, boxes in zip(batch, cast, strict=True) if want.target]
    placed = place([target for _, target, _ in on_device], [boxes for _, _, boxes in on_device], placement)
    values: dict[int, Any] = {want.number: array for (want, _, _), array in zip(on_device, placed, strict=True)}
    for want, boxes in zip(batch, cast, strict=True):
        if want.target is None:
            (array,) = boxes.values()
            values[want.number] = array[()] if want.leaf.kind == "scalar" else array
        elif want.leaf.kind == "key":
            keys = jax.random.wrap_key_data(values[want.number], impl=want.leaf.impl)
            values[want.number] = keys if want.key_sharding is None else jax.device_put(keys, want.key_sharding)
    return values
