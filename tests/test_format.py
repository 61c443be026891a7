"""What was ever saved can be restored for ever."""

import asyncio
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import CorruptCheckpointError, SaveOptions, _manifest

STORED = Path(__file__).parent / "data" / "format-1"

DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4", "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn"),
]

THREEFRY = [[3716834203, 3481239269], [1946498123, 2217676430]]
RBG = [0, 4, 0, 4]

Pair = namedtuple("Pair", ["first", "second"])


def of_dtype(name: str) -> np.ndarray[Any, Any]:
    """Some values that every dtype has, the same for ever."""
    return np.array([[1, 0, 1], [0, 1, 1]]).astype(getattr(ml_dtypes, name, name))


def large() -> np.ndarray[Any, Any]:
    return np.arange(16 * 384, dtype=np.float32).reshape(16, 384)


def host_leaves() -> dict[str, Any]:
    """What is restored as it was, without a device."""
    return {
        "numpy": {"matrix": np.arange(12, dtype=np.int64).reshape(3, 4), "empty": np.zeros((0, 3), np.float64)},
        "scalars": [np.float64(0.1), np.int16(-7), np.bool_(True)],
        "python": (True, -(1 << 80), 0.1, float("inf"), 1 - 2j, "text é \n", ""),
        "none": None,
        "pair": Pair([1, 2], {"x": ()}),
        "integers": {7: "an integer key", 10: 1},
        "texts": {"7": "a text key", "A": 1, "a": 2},
        "a/b.c": {"": 1.5},
    }


def make(folder: Path) -> None:
    """How `data/format-1` was made, with jaxckpt 0.1.0. It is never made again."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), PartitionSpec("x"))
    tree = host_leaves() | {
        "large": jax.device_put(large(), sharding),
        "dtypes": {name: jnp.asarray(of_dtype(name)) for name in DTYPES},
        "zero": jnp.asarray(3.5),
        "keys": {
            "threefry": jax.random.split(jax.random.key(3, impl="threefry2x32"), 2),
            "rbg": jax.random.key(4, impl="rbg"),
        },
    }
    options = SaveOptions(pack_below_bytes=256, chunk_bytes=4096)
    jaxckpt.save(folder / "checkpoint", tree, options=options)
    array = jax.device_put(large().astype(ml_dtypes.bfloat16), sharding)
    asyncio.run(jaxckpt.async_serialize([array], [folder / "array"], options=options))


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected) or isinstance(expected, Pair)
    match expected:
        case dict():
            assert found.keys() == expected.keys()
            for key in expected:
                assert_same(found[key], expected[key])
        case list() | tuple():
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)
        case np.ndarray():
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.tobytes() == expected.tobytes()
        case _:
            assert found == expected


def test_a_checkpoint_of_format_1_is_restored_with_every_value() -> None:
    found = jaxckpt.restore(STORED / "checkpoint")
    expected = host_leaves()
    for name, value in expected.items():
        assert_same(found[name], value)
    assert (found["pair"].first, found["pair"].second) == ([1, 2], {"x": ()})
    assert_same(np.asarray(found["large"]), large())
    for name in DTYPES:
        assert isinstance(found["dtypes"][name], jax.Array)
        assert_same(np.asarray(found["dtypes"][name]), of_dtype(name))
    assert (found["zero"].shape, float(found["zero"])) == ((), 3.5)
    assert set(found) == {*expected, "large", "dtypes", "zero", "keys"}


def test_keys_of_format_1_still_make_the_numbers_they_made() -> None:
    keys = jaxckpt.restore(STORED / "checkpoint")["keys"]
    assert str(jax.random.key_impl(keys["threefry"])) == "threefry2x32"
    np.testing.assert_array_equal(
        jax.random.key_data(keys["threefry"]),
        np.array(THREEFRY, np.uint32),
    )
    assert str(jax.random.key_impl(keys["rbg"])) == "rbg"
    np.testing.assert_array_equal(jax.random.key_data(keys["rbg"]), np.array(RBG, np.uint32))


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_format_1_is_restored_onto_any_sharding(devices: int) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:devices]), "x"), PartitionSpec(None, "x"))
    like = {"large": jax.ShapeDtypeStruct((16, 384), jnp.float32, sharding=sharding)}
    found = jaxckpt.restore(STORED / "checkpoint", like, options=jaxckpt.RestoreOptions(partial=True))
    assert found["large"].sharding == sharding
    assert_same(np.asarray(found["large"]), large())


def test_format_1_is_verified_and_described() -> None:
    report = jaxckpt.verify(STORED / "checkpoint")
    assert report.ok, report.faults
    info = jaxckpt.describe(STORED / "checkpoint")
    assert info.format_version == 1
    assert info.versions["jaxckpt"] == "0.1.0"


def test_an_array_of_format_1_is_deserialized() -> None:
    like = jax.ShapeDtypeStruct((16, 384), jnp.bfloat16)
    [found] = asyncio.run(jaxckpt.async_deserialize([STORED / "array"], [like]))
    assert_same(np.asarray(found), large().astype(ml_dtypes.bfloat16))


def test_a_large_leaf_of_format_1_is_a_zarr_array_of_several_chunks() -> None:
    zarr = pytest.importorskip("zarr")
    [data] = (STORED / "checkpoint").glob("d-*")
    assert len(list((data / "arrays" / "large").glob("c.*"))) > 2
    assert_same(zarr.open_array(data / "arrays" / "large", mode="r")[:], large())
    assert list((data / "packs").iterdir()) != []


def test_the_stored_files_are_small() -> None:
    assert sum(file.stat().st_size for file in STORED.rglob("*") if file.is_file()) < 60_000


@pytest.mark.parametrize("call", [jaxckpt.restore, jaxckpt.describe])
def test_a_format_from_the_future_is_refused_by_its_number(tmp_path: Path, call: Any) -> None:
    shutil.copytree(STORED / "checkpoint", tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_bytes(of_version(manifest.read_bytes(), 2))
    with pytest.raises(CorruptCheckpointError, match=r"format version 2, but this jaxckpt reads version 1"):
        call(tmp_path / "a")
    [fault] = jaxckpt.verify(tmp_path / "a").faults
    assert "format version 2, but this jaxckpt reads version 1" in fault.problem
    manifest.write_bytes(of_version(manifest.read_bytes(), 1))
    call(tmp_path / "a")


def of_version(manifest: bytes, version: int) -> bytes:
    """The manifest with another version and its right hash."""
    body = manifest.split(b'"manifest":', 1)[1].rstrip()[:-1]
    for old in b'"format_version":1', b'"format_version":2':
        body = body.replace(old, b'"format_version":%d' % version)
    return b'{"xxh3_128":"' + _manifest.digest(body).encode() + b'","manifest":' + body + b"}"
