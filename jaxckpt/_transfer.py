"""Device <-> host bytes.

To the host there are three ways. `direct` is a view of memory that the host can address
already. `pinned` is one `device_put` into pinned host memory, which runs while the host
does other things, and a view of the result. `staged` copies piece by piece through a
fixed buffer; it is the fallback, and the baseline that the others are measured against.

Source: the pinned-host serializer of https://github.com/jax-ml/jax/pull/22114 and 22169.
"""

import asyncio
import contextlib
import errno
import functools
import math
import mmap
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from msgspec import Struct

from jaxckpt._errors import StorageError
from jaxckpt._options import Transfer
from jaxckpt._shards import Device, Slice, replicated, wanted

Way = Literal["direct", "pinned", "staged"]

PINNED = "pinned_host"
_HOST_KINDS = frozenset({PINNED, "unpinned_host"})
_ALIGNMENT = 64
_MAPPED_BYTES = 1 << 20


class Shard(Struct, frozen=True, gc=False):
    """A part of an array that this process stores, on its device."""

    slice: Slice
    data: Any


def shards(array: jax.Array) -> list[Shard]:
    """The distinct shards of an array that this process holds whole. Takes no copy and does not wait."""
    boxes = replicated(array.sharding, array.shape)
    if len(boxes) == 1 and array.is_fully_replicated:
        return [Shard(boxes[0].slice, array.addressable_data(0))]
    local = by_device(array)
    return [Shard(held.slice, local[held.devices[0]]) for held in boxes]


def by_device(array: jax.Array) -> dict[Device, jax.Array]:
    """The data on each local device."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def way(data: Any, transfer: Transfer, most_pinned_bytes: int) -> Way:
    """How `data`, a shard, gets to the host."""
    device = _device(data)
    if _is_sub_byte(data.dtype):
        return "staged"  # unpacking to whole bytes is a copy anyway: one of bounded size
    if transfer == "direct" or _lives_on_host(data.sharding, device):
        return "direct"
    if transfer == "auto" and device.platform == "cpu":
        return "direct"
    if transfer == "staged" or PINNED not in _memory_kinds(device) or data.nbytes > most_pinned_bytes:
        return "staged"
    return "pinned"


def view(data: Any) -> np.ndarray[Any, Any]:
    """`data` as a numpy array once it is computed: a view where the host can address it.

    Where it cannot, the copy is made of a separate jax.Array, because JAX keeps a host
    copy on the array that it was asked of, and that one is the caller's.
    """
    if isinstance(data, np.ndarray):
        return data
    if _device(data).platform == "cpu" and not _is_sub_byte(data.dtype):
        return np.asarray(data)
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def is_copied_by_cores(data: Any) -> bool:
    """Whether a copy of `data` takes the cores that the program runs on, rather than an engine of the device.

    Many such copies at once are slower than one after the other, and the program stalls.
    """
    return _device(data).platform == "cpu"


class PinnedCopies:
    """Copies into pinned host memory, for one save.

    When the allocation of pinned memory fails, this and all later copies of the save
    are ordinary ones instead, with one warning.
    """

    def __init__(self) -> None:
        self._failed = False

    def start(self, arrays: Sequence[jax.Array]) -> Callable[[], list[np.ndarray[Any, Any]]]:
        """Start one batched copy of single-device arrays; call the result to wait for it.

        When this returns, the arrays may be donated or deleted.
        """
        if self._failed:
            return self._ordinary(arrays)
        targets = [SingleDeviceSharding(_device(array), memory_kind=PINNED) for array in arrays]
        try:
            with jax.profiler.TraceAnnotation("jaxckpt: start copies to pinned host memory", arrays=len(arrays)):
                pinned = jax.device_put(list(arrays), targets)
        except jax.errors.JaxRuntimeError as error:
            self._give_up(error)
            return self._ordinary(arrays)

        def finish() -> list[np.ndarray[Any, Any]]:
            try:
                return [_wrap(array) for array in jax.block_until_ready(pinned)]
            except jax.errors.JaxRuntimeError as error:
                self._give_up(error)
                return self._ordinary(arrays)()

        return finish

    def _ordinary(self, arrays: Sequence[jax.Array]) -> Callable[[], list[np.ndarray[Any, Any]]]:
        copies = [np.array(view(array)) for array in arrays]
        return lambda: copies

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            warnings.warn(f"pinned host memory is not to be had ({error}); saving by staged copies", stacklevel=2)


class Staging:
    """One fixed buffer, cut into slots that are used again and again. Belongs to one event loop."""

    def __init__(self, slot_bytes: int, count: int) -> None:
        self.nbytes = count * slot_bytes
        buffer = host_bytes(self.nbytes)
        self._slots: asyncio.Queue[np.ndarray[Any, Any]] = asyncio.Queue()
        for slot in buffer.reshape(count, slot_bytes):
            self._slots.put_nowait(slot)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncGenerator[np.ndarray[Any, Any]]:
        """Bytes to copy into, once a slot is free."""
        slot = await self._slots.get()
        try:
            yield slot
        finally:
            self._slots.put_nowait(slot)


def copy_into(raw: np.ndarray[Any, Any], data: Any, box: Slice) -> np.ndarray[Any, Any]:
    """Copy a box of a shard into the bytes `raw`; return them as an array."""
    source = data if box.shape == data.shape and isinstance(data, np.ndarray) else pull(data, box)
    copy = raw[: source.nbytes].view(source.dtype).reshape(source.shape)
    np.copyto(copy, source)
    return copy


def pull(data: Any, box: Slice) -> np.ndarray[Any, Any]:
    """The box `box` of a shard or numpy array, in its own coordinates, on the host."""
    if isinstance(data, np.ndarray):
        return data[box.index]
    if box.shape == data.shape:
        return view(data)
    if _device(data).platform == "cpu" and not _is_sub_byte(data.dtype):
        return view(data)[box.index]
    return np.asarray(cut(data, box))


def cut(data: jax.Array, box: Slice) -> jax.Array:
    """The box `box` of a shard, on its device."""
    # The starts are operands, so that all boxes of one shape share one compilation.
    return data if box.shape == data.shape else jax.lax.dynamic_slice(data, box.start, box.shape)


@dataclass(frozen=True, slots=True)
class Placement:
    """What the calling thread's JAX configuration says about new arrays; other threads do not inherit it."""

    x64: bool
    default_device: Any

    @classmethod
    def of_this_thread(cls) -> "Placement":
        config: Any = jax.config
        return cls(bool(config.jax_enable_x64), config.jax_default_device)

    @contextlib.contextmanager
    def applied(self) -> Generator[None]:
        with jax.enable_x64(self.x64), jax.default_device(self.default_device):
            yield

    def shares_host_memory(self, sharding: Sharding | None) -> bool:
        """Whether an array there can be a view of a host buffer."""
        if sharding is None:
            device = self.default_device
            platform = device if isinstance(device, str) else (device or jax.local_devices()[0]).platform
            return platform == "cpu"
        device = next(iter(sharding.device_set))
        return device.platform == "cpu" and not _lives_on_host(sharding, device)

    def holds(self, dtype: np.dtype[Any]) -> bool:
        """Whether arrays of `dtype` can be made, rather than silently narrowed to 32 bits."""
        return self.x64 or dtype.name not in ("int64", "uint64", "float64", "complex128")


@functools.cache
def is_of_jax(dtype: np.dtype[Any]) -> bool:
    """Whether this JAX has arrays of `dtype`."""
    if dtype.name in ("float6_e2m3fn", "float6_e3m2fn"):  # which JAX takes and XLA does not
        return False
    try:
        jax.typeof(np.empty(0, dtype))
    except TypeError:
        return False
    return True


class Target(Struct, frozen=True, gc=False):
    """What a restored array is to be: on which sharding, or None for the default device."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding | None

    @property
    def is_one_put(self) -> bool:
        """Whether one `device_put` of the whole array makes it. On devices of other processes that is a collective."""
        sharding = self.sharding
        return sharding is None or (sharding.is_fully_replicated and sharding.is_fully_addressable)

    def boxes(self) -> list[Slice]:
        """The distinct boxes that have to be read for it."""
        if self.is_one_put:
            return [Slice((0,) * len(self.shape), self.shape)]
        assert self.sharding is not None
        return list(dict.fromkeys(box for _, box in wanted(self.sharding, self.shape)))


def place(
    targets: Sequence[Target], hosts: Sequence[dict[Slice, np.ndarray[Any, Any]]], placement: Placement
) -> list[jax.Array]:
    """Put arrays on their devices with one batched `device_put`, and wait for it.

    On CPU devices an array becomes a view of its host buffer where that is aligned.
    """
    data: list[np.ndarray[Any, Any]] = []
    where: list[Sharding | None] = []
    counts: list[int] = []
    for target, host in zip(targets, hosts, strict=True):
        sharding = target.sharding
        if target.is_one_put:
            parts = [(next(iter(host.values())), sharding)]
        else:
            assert sharding is not None
            kind = sharding.memory_kind
            parts = [
                (host[box], SingleDeviceSharding(device, memory_kind=kind))
                for device, box in wanted(sharding, target.shape)
            ]
        counts.append(len(parts))
        data.extend(part for part, _ in parts)
        where.extend(on for _, on in parts)
    with placement.applied(), jax.profiler.TraceAnnotation("jaxckpt: place arrays", arrays=len(data)):
        arrays = jax.block_until_ready(_put(data, where))
    return _assemble(targets, arrays, counts)


def _put(data: Sequence[np.ndarray[Any, Any]], where: Sequence[Sharding | None]) -> list[jax.Array]:
    """One `device_put` for what has a sharding, and one for what goes to the default device, uncommitted."""
    placed = [at for at, sharding in enumerate(where) if sharding is not None]
    free = [at for at, sharding in enumerate(where) if sharding is None]
    arrays = dict(zip(placed, jax.device_put([data[at] for at in placed], [where[at] for at in placed]), strict=True))
    arrays |= zip(free, jax.device_put([data[at] for at in free]), strict=True)
    return [arrays[at] for at in range(len(data))]


def _assemble(targets: Sequence[Target], arrays: Sequence[jax.Array], counts: Sequence[int]) -> list[jax.Array]:
    built, at = [], 0
    for target, count in zip(targets, counts, strict=True):
        parts, at = arrays[at : at + count], at + count
        built.append(parts[0] if target.is_one_put else _joined(target, list(parts)))
    return built


def can_fill(target: Target) -> bool:
    """Whether shards of `target` can be filled in place: in the memory that computations run on."""
    if target.sharding is None:
        return False
    device = next(iter(target.sharding.device_set))
    return target.sharding.memory_kind in (None, device.default_memory().kind)


def blank(target: Target, placement: Placement) -> dict[Device, jax.Array]:
    """An empty shard on each local device, for `put_part` to fill piece by piece."""
    assert target.sharding is not None
    kind = target.sharding.memory_kind
    with placement.applied():
        return {
            device: jax.device_put(
                jnp.zeros(box.shape, target.dtype, device=device), SingleDeviceSharding(device, memory_kind=kind)
            )
            for device, box in wanted(target.sharding, target.shape)
        }


def put_part(
    shards_: dict[Device, jax.Array],
    target: Target,
    box: Slice,
    part: np.ndarray[Any, Any],
    placement: Placement,
) -> None:
    """Copy `part`, the box `box` of the array, into every shard that holds it, in place on the device."""
    assert target.sharding is not None
    with placement.applied():
        for device, held in wanted(target.sharding, target.shape):
            if box.intersect(held) == box:
                moved = jax.device_put(part, shards_[device].sharding)
                shards_[device] = _update(shards_[device], moved, box.within(held).start)
        jax.block_until_ready(list(shards_.values()))


def join(shards_: dict[Device, jax.Array], target: Target) -> jax.Array:
    """The array whose shards these are."""
    return _joined(target, list(shards_.values()))


def _joined(target: Target, parts: list[jax.Array]) -> jax.Array:
    assert target.sharding is not None
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, parts, dtype=target.dtype)


@partial(jax.jit, donate_argnums=0)
def _update(shard: jax.Array, part: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, part, start)


def host_bytes(nbytes: int) -> np.ndarray[Any, Any]:
    """Zeroed bytes that start where a CPU device can use them in place.

    Large ones come straight from the system and go back to it: the allocator would keep
    them, in the arena of whichever thread asked, and the process would grow.
    """
    if nbytes < _MAPPED_BYTES:
        raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + nbytes]
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StorageError(errno.ENOMEM, f"the system has no {nbytes} bytes of memory", "host memory") from error
    if sys.platform == "linux":
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def host_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A C-ordered array in `host_bytes`."""
    return host_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def _lives_on_host(sharding: Sharding, device: Device) -> bool:
    kind = sharding.memory_kind
    return kind in _HOST_KINDS and kind != device.default_memory().kind


@lru_cache(maxsize=256)
def _is_sub_byte(dtype: np.dtype[Any]) -> bool:
    """Whether numpy holds each element in a byte of which the device needs a part."""
    if dtype.itemsize > 1 or dtype == np.bool_:
        return False
    return (ml_dtypes.iinfo if dtype.name.startswith(("int", "uint")) else ml_dtypes.finfo)(dtype).bits < 8


def _wrap(array: jax.Array) -> np.ndarray[Any, Any]:
    try:
        return np.array(array, copy=False)
    except ValueError:
        return np.asarray(array)


def _device(data: jax.Array) -> Device:
    (device,) = data.sharding.device_set
    return device


@lru_cache(maxsize=256)
def _memory_kinds(device: Device) -> frozenset[str]:
    return frozenset(memory.kind for memory in device.addressable_memories())
