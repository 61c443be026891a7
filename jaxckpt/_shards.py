"""Which boxes of an array a process stores or needs, and how a box is cut up. Pure planning."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, Sharding
from msgspec import Struct

from jaxckpt._manifest import ShardingInfo

Shape = tuple[int, ...]
Device = Any
"""A jax.Device, which type checkers take for a variable."""

BLOCK_BYTES = 16 << 20
"""A piece is hashed in blocks of at most this many of its array bytes."""

_PRIME = 2**61 - 1
_random = random.Random()


class Slice(Struct, frozen=True, gc=False):
    """A box of an array: where it starts (inclusive) and how long it is, on every axis."""

    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def index(self) -> tuple[Any, ...]:
        """The numpy index of this box. It ends in an ellipsis, so that one of rank 0 is a view too."""
        return (*(slice(at, at + n) for at, n in zip(self.start, self.shape, strict=True)), ...)

    def within(self, outer: "Slice") -> "Slice":
        """This box in the coordinates of `outer`, which contains it."""
        start = tuple(at - origin for at, origin in zip(self.start, outer.start, strict=True))
        return Slice(start, self.shape)

    def shifted(self, origin: Shape) -> "Slice":
        return Slice(tuple(at + by for at, by in zip(self.start, origin, strict=True)), self.shape)

    def intersect(self, other: "Slice") -> "Slice | None":
        """The box that both share, or None where that is empty."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            start.append(low)
            shape.append(high - low)
        return Slice(tuple(start), tuple(shape))


class Block(Struct, frozen=True, gc=False):
    """A contiguous run of a piece's bytes that is a box of it too: the unit of hashing and reading."""

    slice: Slice
    offset: int
    nbytes: int


def describe(sharding: Sharding) -> ShardingInfo:
    """The sharding as a record."""
    devices = len(sharding.device_set)
    if not isinstance(sharding, NamedSharding):
        return ShardingInfo(type=type(sharding).__name__, devices=devices, memory_kind=sharding.memory_kind)
    spec = [list(map(str, part)) if isinstance(part, tuple) else part and str(part) for part in sharding.spec]
    mesh = {str(name): size for name, size in sharding.mesh.shape.items()}
    return ShardingInfo(type="NamedSharding", devices=devices, memory_kind=sharding.memory_kind, mesh=mesh, spec=spec)


def whole(shape: Shape) -> Slice:
    return Slice((0,) * len(shape), shape)


class Replicated(Struct, frozen=True, gc=False):
    """A slice of an array, the processes that hold a copy, and for each of those its device of lowest id."""

    slice: Slice
    processes: tuple[int, ...]
    devices: tuple[Device, ...]


@lru_cache(maxsize=4096)
def replicated(sharding: Sharding, shape: Shape) -> tuple[Replicated, ...]:
    """The distinct slices of a sharding that are not empty, the same in every process."""
    found: dict[Slice, dict[int, Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders = found.setdefault(_slice_of(index, shape), {})
        held = holders.get(device.process_index)
        if held is None or device.id < held.id:
            holders[device.process_index] = device
    return tuple(
        Replicated(box, tuple(sorted(holders)), tuple(holders[process] for process in sorted(holders)))
        for box, holders in found.items()
        if box.size
    )


def owners(units: Sequence[tuple[tuple[int, ...], int]]) -> list[int]:
    """Which process writes each unit, given the processes that hold it and its bytes, at least one.

    Decided from nothing else, so that all processes agree without a word. Of the units
    that the same processes hold each one gets an equal share of the bytes, give or take
    one unit, as one run in their order.
    """
    total: dict[tuple[int, ...], int] = defaultdict(int)
    for processes, nbytes in units:
        total[processes] += nbytes
    begun: dict[tuple[int, ...], int] = defaultdict(int)
    found: list[int] = []
    for processes, nbytes in units:
        middle = 2 * begun[processes] + nbytes
        begun[processes] += nbytes
        found.append(processes[middle * len(processes) // (2 * total[processes])])
    return found


@lru_cache(maxsize=4096)
def wanted(sharding: Sharding, shape: Shape) -> tuple[tuple[Device, Slice], ...]:
    """The slice that each local device holds, in the order in which an array is assembled."""
    indices = sharding.addressable_devices_indices_map(shape)
    return tuple((device, _slice_of(index, shape)) for device, index in indices.items() if index is not None)


def chunk_shape(shard: Shape, array: Shape, itemsize: int, target_bytes: int) -> Shape:
    """The chunk that tiles every shard exactly and has at most `target_bytes`.

    Leading axes are cut first, so that a chunk is one contiguous run of the shard's
    bytes. On an axis that is not sharded the last chunk may be smaller. A sharded
    axis that has no divisor of a useful size (a large prime) is left longer than the
    target rather than cut into slivers.
    """
    chunk = [max(1, n) for n in shard]
    for axis, length in enumerate(chunk):
        row = math.prod(chunk[axis + 1 :]) * itemsize
        if length * row <= target_bytes:
            break
        rows = max(1, target_bytes // row)
        if length == array[axis]:
            chunk[axis] = math.ceil(length / math.ceil(length / rows))
        else:
            chunk[axis] = _divisor(length, rows, least=min(rows, math.ceil(target_bytes / 64 / row)))
        if chunk[axis] > 1:
            break
    return tuple(chunk)


def _divisor(length: int, most: int, least: int) -> int:
    """The largest divisor of `length` up to `most`; below `least`, the next one above `most` instead."""
    small = {d for d in range(1, math.isqrt(length) + 1) if length % d == 0}
    divisors = small | {length // d for d in small}
    best = max(d for d in divisors if d <= most)
    return best if best >= least else min(d for d in divisors if d > most)


def chunks(box: Slice, chunk: Shape) -> Iterator[Slice]:
    """The chunks of the grid that tile `box`, cut off at its end. `box` starts on the grid."""
    for corner in np.ndindex(*(math.ceil(n / c) for n, c in zip(box.shape, chunk, strict=True))):
        offset = tuple(i * c for i, c in zip(corner, chunk, strict=True))
        shape = tuple(min(c, n - o) for c, n, o in zip(chunk, box.shape, offset, strict=True))
        yield Slice(offset, shape).shifted(box.start)


@lru_cache(maxsize=4096)
def blocks(shape: Shape, itemsize: int, block_bytes: int = BLOCK_BYTES) -> tuple[Block, ...]:
    """Cut a C-ordered box into blocks: contiguous runs of bytes that are boxes as well.

    The first axis whose rows fit in `block_bytes` is cut into runs of whole rows; the
    axes before it are walked index by index. Blocks follow each other without gaps, in
    order of their offset.
    """
    found, offset = [], 0
    for box in chunks(whole(shape), _block_shape(shape, itemsize, block_bytes)):
        nbytes = box.size * itemsize
        found.append(Block(box, offset, nbytes))
        offset += nbytes
    return tuple(found)


def count_blocks(shape: Shape, itemsize: int) -> int:
    """How many `blocks` there are, without making them: a record may claim any shape."""
    return math.prod(-(-n // b) for n, b in zip(shape, _block_shape(shape, itemsize, BLOCK_BYTES), strict=True))


def _block_shape(shape: Shape, itemsize: int, block_bytes: int) -> Shape:
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * itemsize > block_bytes:
        axis += 1
    row = math.prod(shape[axis + 1 :]) * itemsize
    rows = max(1, block_bytes // row) if row else 1
    return (1,) * axis + (rows,) + shape[axis + 1 :] if shape else ()


def is_contiguous(box: Slice, outer: Shape) -> bool:
    """Whether `box` is one run of the bytes of a C-ordered array of shape `outer`."""
    cut = False
    for n, m in zip(reversed(box.shape), reversed(outer), strict=True):
        if cut and n != 1:
            return False
        cut = cut or n != m
    return True


def covers(boxes: list[Slice], shape: Shape) -> bool:
    """Whether `boxes` tile an array of `shape`, each element exactly once.

    Every coordinate of every axis gets a random number, a box the product of the
    differences between its ends. Those of a tiling add up to that of the whole; others
    do by a chance of less than 2^-54. That takes a time linear in the boxes, whatever a
    damaged or hostile record says.

    Source: Schwartz, "Fast probabilistic algorithms for verification of polynomial identities", 1980.
    """
    if len(boxes) == 1:
        return boxes[0] == whole(shape)
    axes = [defaultdict[int, int](partial(_random.getrandbits, 60)) for _ in shape]

    def measure(box: Slice) -> int:
        found = 1
        for ends, at, n in zip(axes, box.start, box.shape, strict=True):
            found = found * (ends[at + n] - ends[at]) % _PRIME
        return found

    return sum(map(measure, boxes)) % _PRIME == measure(whole(shape)) % _PRIME


def _slice_of(index: tuple[slice, ...], shape: Shape) -> Slice:
    bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Slice(tuple(b[0] for b in bounds), tuple(b[1] - b[0] for b in bounds))
