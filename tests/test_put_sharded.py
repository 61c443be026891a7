"""`put_sharded`: the values, the sharding and the memory asked for, and never a view of the caller's array."""

import math
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._transfer import host_array

MIB = 1 << 20
KINDS = [None, "pinned_host", "unpinned_host"]


def mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, ("x", "y")[: len(shape)])


def shardings(kind: str | None) -> list[Sharding]:
    named = [
        (mesh(8), P("x")),
        (mesh(8), P(None, "x")),
        (mesh(8), P()),
        (mesh(4, 2), P("y")),
        (mesh(4, 2), P("y", "x")),
        (mesh(1), P("x")),
    ]
    found: list[Sharding] = [NamedSharding(over, spec, memory_kind=kind) for over, spec in named]
    return [*found, SingleDeviceSharding(jax.devices()[3], memory_kind=kind)]


def numbered(shape: tuple[int, ...], dtype: Any = np.float32, *, offset: int = 0) -> np.ndarray[Any, Any]:
    """Numbers that differ, `offset` elements after an address that a CPU device could use in place."""
    size = math.prod(shape)
    host = host_array((size + offset,), np.dtype(dtype))[offset:].reshape(shape)
    host[...] = (np.arange(size) % 251).reshape(shape).astype(dtype)
    return host


def assert_is(found: jax.Array, expected: np.ndarray[Any, Any], sharding: Sharding) -> None:
    assert (found.shape, found.dtype, found.committed) == (expected.shape, expected.dtype, True)
    assert found.sharding == sharding
    assert found.sharding.memory_kind == sharding.memory_kind
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_every_shard_holds_its_part_and_nothing_that_the_caller_changes_later(kind: str | None, offset: int) -> None:
    for sharding in shardings(kind):
        for layout in (np.ascontiguousarray, np.asfortranarray, lambda array: array[::-1, ::2]):
            host = layout(numbered((64, 32), offset=offset))
            expected = np.array(host)
            found = jaxckpt.put_sharded(host, sharding)
            host[...] = -1
            assert_is(found, expected, sharding)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "pinned_host"])
def test_one_device_gets_all_of_it(kind: str | None) -> None:
    host = numbered((64, 32))
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    found = jaxckpt.put_sharded(host, sharding)
    host[...] = -1
    assert_is(found, numbered((64, 32)), sharding)


def test_an_array_of_fresh_memory_per_shard_is_detached_too() -> None:
    host = numbered((2, 9 * MIB), offset=1)
    expected = np.array(host)
    sharding = NamedSharding(mesh(2), P("x"))
    found = jaxckpt.put_sharded(host, sharding)
    host[...] = -1
    assert_is(found, expected, sharding)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.int4, np.complex64, np.bool_, np.int8])
@pytest.mark.parametrize("shape", [(), (0, 8), (16, 8)])
def test_dtypes_and_empty_shapes(dtype: Any, shape: tuple[int, ...]) -> None:
    sharding = NamedSharding(mesh(8), P(None, "x") if shape else P())
    host = numbered(shape, dtype)
    assert_is(jaxckpt.put_sharded(host, sharding), host, sharding)


def test_a_memory_map_is_read_from_its_file(tmp_path: Any) -> None:
    np.save(tmp_path / "a.npy", numbered((64, 32)))
    host = np.load(tmp_path / "a.npy", mmap_mode="r")
    sharding = NamedSharding(mesh(8), P("x"))
    assert_is(jaxckpt.put_sharded(host, sharding), np.array(host), sharding)


def test_the_result_can_be_donated() -> None:
    sharding = NamedSharding(mesh(4, 2), P("y"))
    found = jaxckpt.put_sharded(numbered((64, 32)), sharding)
    doubled = jax.jit(lambda array: array * 2, donate_argnums=0)(found)
    assert_is(doubled, numbered((64, 32)) * 2, sharding)


def test_float64_is_put_where_it_is_enabled_and_refused_where_jax_would_narrow_it() -> None:
    sharding = NamedSharding(mesh(8), P("x"))
    host = numbered((8,), np.float64)
    with jax.enable_x64(True):
        assert_is(jaxckpt.put_sharded(host, sharding), host, sharding)
    with pytest.raises(jaxckpt.LeafMismatchError, match="host is float64, which JAX would narrow.*jax_enable_x64"):
        jaxckpt.put_sharded(host, sharding)


def test_a_shape_that_the_sharding_does_not_divide_is_a_value_error_that_names_both() -> None:
    with pytest.raises(ValueError, match=r"spec=P\('x',\).* does not fit the shape \(12, 3\) of host") as raised:
        jaxckpt.put_sharded(numbered((12, 3)), NamedSharding(mesh(8), P("x")))
    assert isinstance(raised.value, jaxckpt.LeafMismatchError)
    with pytest.raises(ValueError, match=r"does not fit the shape \(8,\) of host"):
        jaxckpt.put_sharded(numbered((8,)), NamedSharding(mesh(8), P(None, None, "x")))


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ([1.0], "host is a list; expected a numpy array"),
        (np.ma.array([1.0, 2.0], mask=[0, 1]), "host is a MaskedArray; expected a numpy array"),
        (np.arange(8, dtype=">i4"), "host has dtype dtype\\('>i4'\\), of which JAX has no arrays"),
        (np.array(["a"]), "host has dtype dtype\\('<U1'\\), of which JAX has no arrays"),
        (np.array([object()]), "host has dtype dtype\\('O'\\), of which JAX has no arrays"),
    ],
)
def test_what_is_no_numpy_array_of_numbers_is_a_type_error(host: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says) as raised:
        jaxckpt.put_sharded(host, NamedSharding(mesh(1), P()))
    assert isinstance(raised.value, jaxckpt.UnsupportedLeafError)


def test_a_jax_array_and_a_device_as_sharding_are_type_errors() -> None:
    with pytest.raises(TypeError, match="host is a ArrayImpl; expected a numpy array"):
        jaxckpt.put_sharded(jax.numpy.ones(8), NamedSharding(mesh(8), P("x")))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="sharding is a .*; expected a jax.sharding.Sharding"):
        jaxckpt.put_sharded(numbered((8,)), jax.devices()[0])  # pyright: ignore[reportArgumentType]
