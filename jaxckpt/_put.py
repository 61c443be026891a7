"""One numpy array onto any sharding, the way a restore does it."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxckpt._errors import LeafMismatchError, UnsupportedLeafError
from jaxckpt._manifest import is_stored_dtype
from jaxckpt._options import MIB
from jaxckpt._transfer import Placement, Target, host_array, is_of_jax, place

_FRESH_BYTES = 32 * MIB
"""From this size on malloc asks the system for every buffer and gives it back, in small pages."""


def put_sharded(host: np.ndarray[Any, Any], sharding: Sharding) -> jax.Array:
    """Put a numpy array onto the devices of a sharding, shard by shard, all with one batched `device_put`.

    When this returns, the transfer is over and the result shares no memory with `host`, which
    may then be changed or freed. (`jax.device_put` makes a view of an aligned numpy array on
    CPU devices, and later changes to it show.) Each shard is sent from where it lies in
    `host`: nothing is gathered on one device or copied there first. On CPU devices the ones
    that hold the same slice share one copy of it.

    In a program of several processes each passes the whole array and puts the slices of its
    own devices; nothing is communicated, and nobody checks that the arrays are the same.

    Args:
        host: Of a shape that the sharding divides evenly. Any memory layout; also a numpy.memmap.
        sharding: Where to: any Sharding, with its memory kind.

    Returns:
        A committed array with exactly this sharding, and the values, shape and dtype of `host`.

    Raises:
        LeafMismatchError: The sharding does not divide the shape (a ValueError), or JAX would
            narrow the dtype because jax_enable_x64 is off.
        UnsupportedLeafError: `host` is no numpy array, or of a dtype that JAX has not (a TypeError).
        TypeError: `sharding` is no Sharding.
        jax.errors.JaxRuntimeError: A device has not enough memory.

    Example:
        >>> import jax, jaxckpt, numpy as np
        >>> mesh = jax.make_mesh((jax.device_count(),), ("x",))
        >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        >>> jaxckpt.put_sharded(np.ones((16, 4), np.float32), rows).sum()
        Array(64., dtype=float32)

    Source: the batched `device_put` that https://github.com/jax-ml/jax/issues/16905 comes to.
    """
    placement = Placement.of_this_thread()
    _check(host, sharding, placement)
    target = Target(host.shape, host.dtype, sharding)
    parts = {box: host[box.index] for box in target.boxes()}
    if next(iter(sharding.device_set)).platform != "cpu":
        return place([target], [parts], placement)[0]
    if len(parts) < len(sharding.addressable_devices) or any(map(_is_fresh, parts.values())):
        return place([target], [{box: _copy(part) for box, part in parts.items()}], placement)[0]
    result = place([target], [parts], placement)[0]
    if not _is_view(result, host):
        return result
    return jax.block_until_ready(jax.device_put(result, sharding, may_alias=False))


def _check(host: Any, sharding: Any, placement: Placement) -> None:
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding is a {type(sharding).__name__}; expected a jax.sharding.Sharding")
    if not isinstance(host, np.ndarray) or isinstance(host, np.ma.MaskedArray):
        raise UnsupportedLeafError(f"host is a {type(host).__name__}; expected a numpy array")
    if not (is_stored_dtype(host.dtype) and is_of_jax(host.dtype)):
        raise UnsupportedLeafError(f"host has dtype {host.dtype!r}, of which JAX has no arrays; convert it")
    if not placement.holds(host.dtype):
        raise LeafMismatchError(
            f"host is {host.dtype}, which JAX would narrow to 32 bits; set jax_enable_x64, or convert it"
        )
    try:
        sharding.shard_shape(host.shape)
    except (ValueError, IndexError) as error:
        raise LeafMismatchError(
            f"{sharding} does not fit the shape {host.shape} of host; "
            "each axis must be a multiple of the number of parts that it is cut into"
        ) from error


def _is_fresh(part: np.ndarray[Any, Any]) -> bool:
    """Whether JAX's own copy would take memory that comes page by page from the system, slower than `_copy`."""
    return part.nbytes >= _FRESH_BYTES


def _copy(part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that CPU devices, however many, use in place."""
    copy = host_array(part.shape, part.dtype)
    np.copyto(copy, part)
    return copy


def _is_view(array: jax.Array, host: np.ndarray[Any, Any]) -> bool:
    """Whether a shard on a CPU device, in whichever of its kinds of memory, lies in that of `host`."""
    start, end = np.lib.array_utils.byte_bounds(host)
    return any(start <= shard.data.unsafe_buffer_pointer() < end for shard in array.addressable_shards)
