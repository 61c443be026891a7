"""Leaves: what is saved comes back bit for bit, and what cannot be saved is refused before anything is written."""

import asyncio
import datetime
import decimal
import enum
import operator
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jaxckpt
from jaxckpt import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    LeafMismatchError,
    RestoreOptions,
    SaveOptions,
    StorageError,
    UnsupportedLeafError,
)

try:
    from jax import enable_x64
except ImportError:  # jax < 0.8
    from jax.experimental import enable_x64

WIDE = ("complex128", "float64", "int64", "uint64")
JAX_DTYPES = sorted({np.dtype(kind).name for kind in vars(jnp).values() if isinstance(kind, type(jnp.float32))})
ML_DTYPES = sorted(
    {np.dtype(k).name for k in vars(ml_dtypes).values() if isinstance(k, type) and issubclass(k, np.generic)}
)
alone_and_packed = pytest.mark.parametrize("pack_below_bytes", [0, 1 << 20], ids=["alone", "packed"])


class Colour(enum.IntEnum):
    RED = 1


class Title(str):
    __slots__ = ()


def every_pattern(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Each bit pattern that an element of up to 16 bits can have, or random ones of a wider dtype."""
    if dtype == np.bool_:
        return np.array([False, True, True])
    if dtype.itemsize > 2:
        return np.random.default_rng(0).integers(0, 256, 64 * dtype.itemsize, np.uint8).view(dtype)
    if dtype.kind in "iuf" or dtype.name == "bfloat16":
        return np.arange(256**dtype.itemsize, dtype=f"uint{8 * dtype.itemsize}").view(dtype)
    bits = (ml_dtypes.iinfo if "int" in dtype.name else ml_dtypes.finfo)(dtype).bits
    if dtype.name.startswith("int"):
        return np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=np.int8).astype(dtype)
    return np.arange(2**bits, dtype=np.uint8).view(dtype)


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def assert_bits(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def round_trip(path: Path, tree: Any, like: Any = None, options: SaveOptions | None = None) -> Any:
    jaxckpt.save(path, tree, options=options)
    return jaxckpt.restore(path, like)


# Keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("count", [None, 3, 0], ids=["one", "batch", "none"])
@pytest.mark.parametrize("wish", ["nothing", "keys", "a struct", "a sharding"])
def test_a_saved_key_array_comes_back_usable(tmp_path: Path, impl: str, count: int | None, wish: str) -> None:
    key = jax.random.key(7, impl=impl)
    keys = key if count is None else jax.random.split(key, 3)[:count]
    like = {
        "nothing": None,
        "keys": {"k": keys},
        "a struct": {"k": jax.ShapeDtypeStruct(keys.shape, keys.dtype)},
        "a sharding": {"k": SingleDeviceSharding(jax.devices()[2])},
    }[wish]
    found = round_trip(tmp_path / "c", {"k": keys}, like)["k"]
    assert found.dtype == keys.dtype
    assert found.shape == keys.shape
    assert jax.random.key_impl(found) == jax.random.key_impl(keys)
    assert_bits(jax.random.key_data(found), jax.random.key_data(keys))
    draw = jax.random.bits if count is None else jax.vmap(jax.random.bits)
    if count != 0:  # which JAX cannot map over
        assert_bits(draw(found), draw(keys))
    if wish == "a sharding":
        assert found.devices() == {jax.devices()[2]}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (lambda: jax.random.key(0), lambda: jax.random.key(0, impl="rbg")),
        (lambda: jax.random.key(0), lambda: jnp.zeros((), jnp.uint32)),
        (lambda: jnp.zeros((2,), jnp.uint32), lambda: jax.random.split(jax.random.key(0), 2)),
        (lambda: jax.random.key(0), lambda: np.zeros((), np.uint32)),
    ],
    ids=["another impl", "key to uint32", "uint32 to key", "key to numpy"],
)
def test_a_key_is_never_taken_for_something_else(
    tmp_path: Path, saved: Callable[[], Any], like: Callable[[], Any], cast: bool
) -> None:
    jaxckpt.save(tmp_path / "c", {"rng": saved()})
    with pytest.raises(LeafMismatchError, match="leaf rng: "):
        jaxckpt.restore(tmp_path / "c", {"rng": like()}, options=RestoreOptions(cast=cast))


# Casts


def test_an_int32_leaf_restored_as_float32_is_an_error_that_names_leaf_and_dtypes(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"opt": {"step": jnp.int32(16777217)}})
    like = {"opt": {"step": jnp.float32(0)}}
    with pytest.raises(LeafMismatchError, match=r"leaf opt/step: `like` has dtype float32, the checkpoint int32"):
        jaxckpt.restore(tmp_path / "c", like)
    found = jaxckpt.restore(tmp_path / "c", like, options=RestoreOptions(cast=True))["opt"]["step"]
    assert_bits(found, np.float32(16777216))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("int4", "int8"),
        ("float8_e4m3fn", "float16"),
        ("bool", "int32"),
    ],
)
def test_a_cast_that_is_asked_for_converts(
    tmp_path: Path, source: str, dtype: str, memory_map: bool, verify: bool
) -> None:
    values = np.linspace(-4, 4, 24).reshape(4, 6).astype(np.dtype(source))
    jaxckpt.save(tmp_path / "c", {"jax": jnp.asarray(values), "numpy": values})
    options = RestoreOptions(cast=True, memory_map=memory_map, verify=verify)
    target = np.dtype(dtype)
    like = {"jax": jax.ShapeDtypeStruct((4, 6), target), "numpy": np.empty((4, 6), target)}
    found = jaxckpt.restore(tmp_path / "c", like, options=options)
    assert isinstance(found["jax"], jax.Array)
    assert isinstance(found["numpy"], np.ndarray)
    assert_bits(found["jax"], values.astype(target))
    assert_bits(found["numpy"], values.astype(target))


def test_a_cast_does_not_excuse_another_shape(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w": jnp.ones((2, 3))})
    with pytest.raises(LeafMismatchError, match=r"leaf w: `like` has shape \(3, 2\), the checkpoint \(2, 3\)"):
        jaxckpt.restore(tmp_path / "c", {"w": jnp.ones((3, 2), jnp.int32)}, options=RestoreOptions(cast=True))


# Every dtype


@pytest.mark.gpu
@alone_and_packed
@pytest.mark.parametrize("name", [name for name in JAX_DTYPES if name not in WIDE])
def test_every_dtype_of_jax_comes_back_bit_for_bit(tmp_path: Path, name: str, pack_below_bytes: int) -> None:
    values = every_pattern(np.dtype(name))
    try:
        array = jax.block_until_ready(jnp.asarray(values))
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(f"this XLA cannot hold it: {error}")
    # Made on the host: some XLA versions abort when they compile the indexing of float6.
    scalar, empty = jnp.asarray(values[1]), jnp.asarray(values[:0])
    tree = {"array": array, "scalar": scalar, "empty": empty, "numpy": values, "numpy scalar": values[1]}
    jaxckpt.save(tmp_path / "c", tree, options=SaveOptions(pack_below_bytes=pack_below_bytes))
    for like in (None, tree):
        found = jaxckpt.restore(tmp_path / "c", like)
        for key, expected in tree.items():
            assert isinstance(found[key], jax.Array if isinstance(expected, jax.Array) else type(expected))
            assert_bits(found[key], expected)


@alone_and_packed
@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_dtype_of_ml_dtypes_comes_back_bit_for_bit_in_numpy(
    tmp_path: Path, name: str, pack_below_bytes: int
) -> None:
    values = every_pattern(np.dtype(name))
    found = round_trip(tmp_path / "c", values, options=SaveOptions(pack_below_bytes=pack_below_bytes))
    assert_bits(found, values)


@pytest.mark.parametrize("name", WIDE)
def test_a_64_bit_leaf_is_not_narrowed_when_x64_is_off(tmp_path: Path, name: str) -> None:
    values = every_pattern(np.dtype(name))
    with enable_x64(True):
        array = jnp.asarray(values)
        assert array.dtype == name
        jaxckpt.save(tmp_path / "c", {"wide": array})
        struct = {"wide": jax.ShapeDtypeStruct(array.shape, array.dtype)}
        for like in (None, {"wide": array}, struct):
            assert_bits(jaxckpt.restore(tmp_path / "c", like)["wide"], values)
    assert jaxckpt.describe(tmp_path / "c").tree["wide"].dtype == name
    for like in (None, struct, {"wide": array}, {"wide": SingleDeviceSharding(jax.devices()[0])}):
        with pytest.raises(LeafMismatchError, match=f"leaf wide is {name}, which JAX would narrow to 32 bits"):
            jaxckpt.restore(tmp_path / "c", like)
    assert_bits(jaxckpt.restore(tmp_path / "c", {"wide": np.empty_like(values)})["wide"], values)


def test_a_64_bit_leaf_is_narrowed_when_that_is_asked_for(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w": np.array([1.5, 2.0**-30])})
    like = {"w": jax.ShapeDtypeStruct((2,), np.float32)}
    found = jaxckpt.restore(tmp_path / "c", like, options=RestoreOptions(cast=True))["w"]
    assert_bits(found, np.array([1.5, 2.0**-30], np.float32))


# Shapes


@alone_and_packed
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (0,), (0, 3), (3, 0), (2, 0, 4), (5,), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_a_bare_array_of_any_shape_is_a_whole_tree(
    tmp_path: Path, make: Callable[[Any], Any], shape: tuple[int, ...], pack_below_bytes: int
) -> None:
    array = make(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    jaxckpt.save(tmp_path / "c", array, options=SaveOptions(pack_below_bytes=pack_below_bytes))
    for like in (None, array):
        found = jaxckpt.restore(tmp_path / "c", like)
        assert isinstance(found, jax.Array if make is jnp.asarray else np.ndarray)
        assert_bits(found, array)


# Python values

VALUES = [
    *(0, -1, True, False, 2**63, -(2**64)),
    pytest.param(10**5000, id="5001 digits"),
    *(0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan")),
    *(1j, complex(-0.0, 2.5), complex("nan+infj")),
    *("", "naïve", "日本語 🚀", "a\0b", "line\nbreak", '"quoted" \\', "\u202e", " "),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: ascii(value)[:20] if type(value) is str else None)
def test_a_python_value_comes_back_with_its_type(tmp_path: Path, value: Any) -> None:
    tree = {"value": value, "none": None, "array": jnp.ones(2)}
    jaxckpt.save(tmp_path / "c", tree)
    for like in (None, tree):
        found = jaxckpt.restore(tmp_path / "c", like)
        assert type(found["value"]) is type(value)
        assert found["none"] is None
        if isinstance(value, float | complex):
            assert np.array(found["value"]).tobytes() == np.array(value).tobytes()
        else:
            assert found["value"] == value


@pytest.mark.parametrize("value", [Colour.RED, Title("x")], ids=["IntEnum", "subclass of str"])
def test_a_value_of_a_subclass_is_refused_rather_than_turned_into_its_base(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=f"leaf x is of type .*{type(value).__name__}"):
        jaxckpt.save(tmp_path / "c", {"x": value})
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("saved", "like", "message"),
    [
        (1, 1.0, "leaf x: `like` asks for float, the checkpoint has a Python int"),
        (1, True, "leaf x: `like` asks for bool, the checkpoint has a Python int"),
        (True, 1, "leaf x: `like` asks for int, the checkpoint has a Python bool"),
        ("a", 1, "leaf x: `like` asks for int, the checkpoint has a Python str"),
        (1, np.zeros(()), "leaf x: `like` asks for ndarray, the checkpoint has a Python int"),
        (10**5000, "a", "leaf x: `like` asks for str, the checkpoint has a Python int"),
        (np.zeros((2, 3)), 1.0, r"leaf x: `like` asks for float, the checkpoint has an array of float64\[2, 3\]"),
        (np.zeros(()), "a", "leaf x: `like` asks for str, the checkpoint has an array"),
        (1, None, "leaf x is in the checkpoint but not in `like`"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_not_taken_for_another_type(tmp_path: Path, saved: Any, like: Any, message: str) -> None:
    jaxckpt.save(tmp_path / "c", {"x": saved})
    with pytest.raises(LeafMismatchError, match=message):
        jaxckpt.restore(tmp_path / "c", {"x": like})


def test_a_python_value_is_cast_when_that_is_asked_for(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": 3})
    found = jaxckpt.restore(tmp_path / "c", {"x": 0.0}, options=RestoreOptions(cast=True))["x"]
    assert (type(found), found) == (float, 3.0)


def test_a_python_value_that_cannot_be_cast_is_an_error_that_names_it(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": "three"})
    with pytest.raises(LeafMismatchError, match="leaf x"):
        jaxckpt.restore(tmp_path / "c", {"x": 0}, options=RestoreOptions(cast=True))


# numpy


def numpy_variants(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    base = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)
    mapped = np.memmap(directory / "raw", np.int16, "w+", shape=(3, 4))
    mapped[:] = np.arange(12).reshape(3, 4)
    unaligned = np.frombuffer(bytes(1) + base.tobytes(), np.uint8)[1:].view(np.float32)
    assert not unaligned.flags.aligned
    return {
        "C order": base,
        "Fortran order": np.asfortranarray(base),
        "transposed": base.T,
        "middle axis cut": base[:, 1:4],
        "every other": base[::2, ::3, ::2],
        "reversed": base[::-1, :, ::-1],
        "broadcast": np.broadcast_to(base[0, 0], (3, 5)),
        "unaligned": unaligned,
        "read-only": np.frombuffer(base.tobytes(), np.float32),
        "0-d": np.array(3.5, np.float16),
        "empty": base[:, :0],
        "empty and strided": base[::2, 3:3, ::-1],
        "memmap": mapped,
        "matrix": base[0].view(np.matrix),
        "bfloat16, strided": base.astype(jnp.bfloat16)[:, ::2],
        "bool": base > 3,
        "complex": (base + 1j).astype(np.complex128).T,
    }


@alone_and_packed
@pytest.mark.parametrize("call", ["save", "start_save", "async_serialize"])
def test_a_numpy_array_of_any_layout_comes_back_equal(tmp_path: Path, call: str, pack_below_bytes: int) -> None:
    tree = numpy_variants(tmp_path)
    copies = {name: np.array(array) for name, array in tree.items()}
    options = SaveOptions(pack_below_bytes=pack_below_bytes, chunk_bytes=4096)
    if call == "async_serialize":
        paths = {name: tmp_path / "arrays" / name for name in tree}
        asyncio.run(jaxckpt.async_serialize(tree, paths, options=options))
        found = asyncio.run(jaxckpt.async_deserialize(paths, copies))
    elif call == "save":
        found = round_trip(tmp_path / "c", tree, options=options)
    else:
        jaxckpt.start_save(tmp_path / "c", tree, options=options).result()
        found = jaxckpt.restore(tmp_path / "c")
    for name, expected in copies.items():
        assert type(found[name]) is np.ndarray
        assert_bits(found[name], expected)
        assert found[name].flags.writeable
        assert_bits(tree[name], expected)


@pytest.mark.parametrize("name", [name for name in JAX_DTYPES if np.dtype(name).kind in "biufc"])
def test_a_numpy_scalar_comes_back_as_one(tmp_path: Path, name: str) -> None:
    scalar = np.dtype(name).type(1)
    for number, like in enumerate((None, {"s": scalar})):
        found = round_trip(tmp_path / str(number), {"s": scalar}, like)["s"]
        assert type(found) is type(scalar)
        assert found == scalar


@pytest.mark.gpu
@alone_and_packed
@pytest.mark.parametrize("nbytes", [64, 3 << 20])
@pytest.mark.parametrize("max_host_bytes", [None, 1 << 20])
def test_numpy_leaves_overwritten_right_after_start_save_are_saved_as_they_were(
    tmp_path: Path, nbytes: int, pack_below_bytes: int, max_host_bytes: int | None
) -> None:
    tree = {
        "contiguous": np.arange(nbytes // 8, dtype=np.int64),
        "strided": np.arange(nbytes // 4, dtype=np.int64)[::2],
        "fortran": np.asfortranarray(np.arange(nbytes // 8, dtype=np.int64).reshape(2, -1)),
        "jax": jnp.arange(3),
    }
    expected = {name: np.array(leaf) for name, leaf in tree.items()}
    options = SaveOptions(pack_below_bytes=pack_below_bytes, max_host_bytes=max_host_bytes)
    with jaxckpt.start_save(tmp_path / "c", tree, options=options):
        for name in ("contiguous", "strided", "fortran"):
            tree[name][:] = -1
    found = jaxckpt.restore(tmp_path / "c")
    for name, leaf in expected.items():
        assert_bits(found[name], leaf)


@pytest.mark.gpu
def test_a_numpy_leaf_becomes_a_jax_array_and_back_when_like_says_so(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    jaxckpt.save(tmp_path / "c", {"n": values, "j": jnp.asarray(values), "s": np.float32(2)})
    like = {"n": jnp.zeros((2, 3)), "j": np.zeros((2, 3), np.float32), "s": jax.ShapeDtypeStruct((), np.float32)}
    found = jaxckpt.restore(tmp_path / "c", like)
    assert isinstance(found["n"], jax.Array)
    assert isinstance(found["s"], jax.Array)
    assert type(found["j"]) is np.ndarray
    assert_bits(found["n"], values)
    assert_bits(found["j"], values)
    assert float(found["s"]) == 2


# Placement


def test_restored_arrays_are_bound_to_devices_only_where_like_is(tmp_path: Path) -> None:
    values = jnp.arange(4.0)
    free, bound = jnp.zeros(4), jax.device_put(jnp.zeros(4), jax.devices()[3])
    tree = dict.fromkeys(("free", "bound", "struct", "struct there"), values)
    jaxckpt.save(tmp_path / "c", tree)
    like = {
        "free": free,
        "bound": bound,
        "struct": jax.ShapeDtypeStruct((4,), np.float32),
        "struct there": jax.ShapeDtypeStruct((4,), np.float32, sharding=bound.sharding),
    }
    found = jaxckpt.restore(tmp_path / "c", like)
    assert {name: array.committed for name, array in found.items()} == {
        "free": False,
        "bound": True,
        "struct": False,
        "struct there": True,
    }
    assert found["bound"].devices() == found["struct there"].devices() == {jax.devices()[3]}
    assert (found["free"] + bound).devices() == {jax.devices()[3]}
    assert not any(array.committed for array in jaxckpt.restore(tmp_path / "c").values())


def test_restored_arrays_go_to_the_callers_default_device(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w": jnp.arange(4.0), "k": jax.random.key(0)})
    with jax.default_device(jax.devices()[5]):
        found = jaxckpt.restore(tmp_path / "c")
    assert found["w"].devices() == found["k"].devices() == {jax.devices()[5]}
    assert not found["w"].committed


# Leaves that are refused


def donated(array: Any) -> Any:
    jax.block_until_ready(jax.jit(operator.neg, donate_argnums=0)(array))
    return array


def deleted(array: Any) -> Any:
    array.delete()
    return array


NOT_A_NUMBER = r"has dtype .*; expected a number or bool in native byte order"
UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: lambda: None, r"is of type builtins\.function"),
    "open file": (lambda: sys.__stderr__, r"is of type _io\.TextIOWrapper"),
    "object": (object, r"is of type builtins\.object"),
    "bytes": (lambda: b"x", r"is of type builtins\.bytes"),
    "set": (lambda: {1}, r"is of type builtins\.set"),
    "decimal": (lambda: decimal.Decimal(1), r"is of type decimal\.Decimal"),
    "date": (lambda: datetime.date(2020, 1, 1), r"is of type datetime\.date"),
    "dtype": (lambda: np.dtype("int8"), r"is of type numpy\..*DType"),
    "struct": (lambda: jax.ShapeDtypeStruct((2,), np.float32), r"is of type jax\..*ShapeDtypeStruct"),
    "masked": (lambda: np.ma.masked_array([1, 2], [True, False]), "is a masked array; save its data and its mask"),
    "deleted": (lambda: deleted(jnp.ones(3)), "was deleted or donated before the save began"),
    "deleted keys": (lambda: deleted(jax.random.split(jax.random.key(0))), "was deleted or donated"),
    "donated": (lambda: donated(jnp.ones(3)), "was deleted or donated before the save began"),
    "big-endian": (lambda: np.arange(3, dtype=">i4"), NOT_A_NUMBER),
    "datetime64": (lambda: np.array(["2020-01-01"], "datetime64[D]"), NOT_A_NUMBER),
    "timedelta64": (lambda: np.timedelta64(1, "s"), NOT_A_NUMBER),
    "object array": (lambda: np.array([1, "a"], object), NOT_A_NUMBER),
    "str array": (lambda: np.array(["a"]), NOT_A_NUMBER),
    "numpy str": (lambda: np.str_("a"), NOT_A_NUMBER),
    "bytes array": (lambda: np.array([b"a"]), NOT_A_NUMBER),
    "StringDType": (lambda: np.array(["a"], np.dtypes.StringDType()), NOT_A_NUMBER),
    "structured": (lambda: np.zeros(2, [("a", np.int32)]), NOT_A_NUMBER),
    "recarray": (lambda: np.rec.array([(1, 2.0)]), NOT_A_NUMBER),
    "void": (lambda: np.zeros(2, "V4"), NOT_A_NUMBER),
    "long double": (lambda: np.zeros(2, np.longdouble), NOT_A_NUMBER),
    "lone surrogate": (lambda: "a\ud800", "has a lone surrogate, which no file can hold"),
}


SAVES: dict[str, Callable[[Path, Any], Any]] = {
    "save": jaxckpt.save,
    "start_save": jaxckpt.start_save,
    "save_async": lambda path, tree: asyncio.run(jaxckpt.save_async(path, tree)),
    "async_serialize": lambda path, tree: asyncio.run(
        jaxckpt.async_serialize(tree, [path / str(number) for number in range(len(jax.tree.leaves(tree)))])
    ),
}


@pytest.mark.parametrize("call", SAVES)
@pytest.mark.parametrize(("make", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_an_unsupported_leaf_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, call: str, make: Callable[[], Any], message: str
) -> None:
    tree = {"good": jnp.ones(4), "layers": [np.ones(3), make()]}
    with pytest.raises(UnsupportedLeafError, match=f"layers/1:? .*{message}"):
        SAVES[call](tmp_path / "new" / "c", tree)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(("make", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_an_overwrite_with_an_unsupported_leaf_leaves_the_old_checkpoint(
    tmp_path: Path, make: Callable[[], Any], message: str
) -> None:
    jaxckpt.save(tmp_path / "c", {"old": np.arange(3)})
    before = files_in(tmp_path)
    with pytest.raises(UnsupportedLeafError, match=f"leaf old .*{message}|leaf old: .*{message}"):
        jaxckpt.save(tmp_path / "c", {"old": make()}, overwrite=True)
    assert files_in(tmp_path) == before
    assert jaxckpt.restore(tmp_path / "c")["old"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("leaf", [1, 2.5, "text", np.float32(1), jax.random.key], ids=lambda leaf: type(leaf).__name__)
def test_async_serialize_refuses_what_is_no_array(tmp_path: Path, leaf: Any) -> None:
    leaf = leaf(0) if callable(leaf) else leaf
    with pytest.raises(UnsupportedLeafError, match=r"array b is of type .*; expected a JAX or numpy array"):
        asyncio.run(jaxckpt.async_serialize({"a": jnp.ones(2), "b": leaf}, {"a": tmp_path / "a", "b": tmp_path / "b"}))
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=lambda transform: transform.__name__)
def test_a_traced_array_is_refused(tmp_path: Path, transform: Callable[..., Any]) -> None:
    def loss(w: Any) -> Any:
        jaxckpt.save(tmp_path / "c", {"w": w})
        return w.sum()

    with pytest.raises(UnsupportedLeafError, match="leaf w is being traced; save outside of jit, grad and vmap"):
        transform(loss)(jnp.ones(3))
    assert files_in(tmp_path) == []


def test_one_bad_leaf_of_a_bare_tree_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"leaf \(the tree itself is one leaf\) is of type"):
        jaxckpt.save(tmp_path / "c", object())
    assert files_in(tmp_path) == []


# Bad arguments


def calls(path: Any) -> dict[str, Callable[[], Any]]:
    tree = {"w": np.ones(3)}
    return {
        "save": lambda: jaxckpt.save(path, tree),
        "start_save": lambda: jaxckpt.start_save(path, tree),
        "save_async": lambda: asyncio.run(jaxckpt.save_async(path, tree)),
        "restore": lambda: jaxckpt.restore(path),
        "restore_async": lambda: asyncio.run(jaxckpt.restore_async(path)),
        "describe": lambda: jaxckpt.describe(path),
        "async_serialize": lambda: asyncio.run(jaxckpt.async_serialize([tree["w"]], [path])),
        "async_deserialize": lambda: asyncio.run(jaxckpt.async_deserialize([path], [tree["w"]])),
    }


WRITING = ("save", "start_save", "save_async", "async_serialize")
every_call = pytest.mark.parametrize("call", calls(""))


@every_call
@pytest.mark.parametrize("path", [3, b"bytes", 2.5, Path], ids=repr)
def test_a_path_of_the_wrong_type_is_refused(call: str, path: Any) -> None:
    with pytest.raises(TypeError, match=r"the path is .*; expected"):
        calls(path)[call]()


@pytest.mark.parametrize("call", [call for call in calls("") if not call.startswith("async_")])
def test_no_path_at_all_is_refused(call: str) -> None:
    with pytest.raises(TypeError, match="the path is None of type NoneType; expected a str, a PathLike or a URL"):
        calls(None)[call]()


@every_call
@pytest.mark.parametrize("scheme", ["ftp", "http", "hdfs", "gopher"])
def test_a_scheme_that_nobody_supports_is_refused_with_those_that_work(call: str, scheme: str) -> None:
    with pytest.raises(ValueError, match=f"{scheme}://host/c: scheme '{scheme}' is not supported; expected .*file://"):
        calls(f"{scheme}://host/c")[call]()


@every_call
@pytest.mark.parametrize("name", ["", "a\0b", "file://"])
def test_what_cannot_be_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is not a path"):
        calls(name)[call]()
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("call", WRITING)
@pytest.mark.parametrize("below", ["file", "file/c", "file/deep/c"])
def test_a_directory_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path, call: str, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=str(tmp_path / "file")) as caught:
        calls(tmp_path / below)[call]()
    assert isinstance(caught.value, OSError)
    assert caught.value.errno
    assert files_in(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("call", [name for name in calls("") if name not in WRITING])
@pytest.mark.parametrize("below", ["", "nothing", "file", "file/c"])
def test_a_checkpoint_that_is_not_there_is_not_found(tmp_path: Path, call: str, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointNotFoundError, match=r"no (checkpoint|array)") as caught:
        calls(tmp_path / below)[call]()
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("call", WRITING)
def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path, call: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        CheckpointExistsError, match=r"the directory holds other files \(notes.txt\); choose an empty one"
    ):
        calls(tmp_path)[call]()
    assert files_in(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("options", [{"transfer": "auto"}, "auto", 1, "the other"], ids=repr)
@every_call
def test_options_of_the_wrong_class_are_refused(tmp_path: Path, call: str, options: Any) -> None:
    if call == "describe":
        return
    kind, other = (SaveOptions, RestoreOptions()) if call in WRITING else (RestoreOptions, SaveOptions())
    options = other if options == "the other" else options
    function = getattr(jaxckpt, call)
    arguments = {
        "async_serialize": ([np.ones(3)], [tmp_path / "c"]),
        "async_deserialize": ([tmp_path / "c"], [np.ones(3)]),
    }.get(call, (tmp_path / "c", {"w": np.ones(3)}))

    async def awaited() -> None:
        await function(*arguments, options=options)

    with pytest.raises(TypeError, match=f"options is a {type(options).__name__}; expected {kind.__name__}"):
        asyncio.run(awaited()) if "async" in call else function(*arguments, options=options)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("kind", [SaveOptions, RestoreOptions])
def test_an_unknown_option_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'compress_level'"):
        kind(compress_level=3)


@pytest.mark.parametrize(
    ("kind", "option", "value", "message"),
    [
        (SaveOptions, "transfer", "fast", "transfer is 'fast'; expected one of auto, pinned, direct, staged"),
        (SaveOptions, "transfer", None, "transfer is None; expected one of"),
        (SaveOptions, "max_host_bytes", 1000, "max_host_bytes is 1000; expected at least 1048576 bytes"),
        (SaveOptions, "max_host_bytes", 2.0**30, "max_host_bytes is .*; expected a whole number of bytes"),
        (SaveOptions, "pack_below_bytes", -1, "pack_below_bytes is -1; expected at least 0 bytes"),
        (SaveOptions, "pack_below_bytes", None, "pack_below_bytes is None; expected a whole number"),
        (SaveOptions, "chunk_bytes", 0, "chunk_bytes is 0; expected at least 4096 bytes"),
        (SaveOptions, "chunk_bytes", True, "chunk_bytes is True; expected a whole number of bytes"),
        (SaveOptions, "chunk_bytes", "128M", "chunk_bytes is '128M'; expected a whole number of bytes"),
        (SaveOptions, "timeout_seconds", 0, "timeout_seconds is 0; expected more than 0 seconds"),
        (SaveOptions, "timeout_seconds", float("nan"), "timeout_seconds is nan; expected more than 0 seconds"),
        (SaveOptions, "timeout_seconds", "soon", "timeout_seconds is 'soon'; expected"),
        (RestoreOptions, "max_host_bytes", 0, "max_host_bytes is 0; expected at least 1048576 bytes"),
        (RestoreOptions, "timeout_seconds", -1, "timeout_seconds is -1; expected more than 0 seconds"),
        (RestoreOptions, "verify", "no", "verify is 'no'; expected"),
        (RestoreOptions, "cast", "float32", "cast is 'float32'; expected"),
        (RestoreOptions, "partial", None, "partial is None; expected"),
        (RestoreOptions, "memory_map", 1, "memory_map is 1; expected"),
    ],
)
def test_an_option_out_of_range_is_refused_when_it_is_made(kind: Any, option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**{option: value})


def test_a_restore_without_like_warns_of_nothing(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w": jnp.ones(3), "n": np.arange(3), "c": 1j})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxckpt.restore(tmp_path / "c")
