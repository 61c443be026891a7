"""Sharding: what one set of devices saved, any other restores; the same bytes in every transfer, in plain Zarr."""

import asyncio
import itertools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    RestoreOptions,
    SaveOptions,
)

TRANSFERS = ("auto", "pinned", "direct", "staged")
MIB = 1 << 20


def over(shape: tuple[int, ...], spec: P, *, memory_kind: str | None = None, order: int = 1) -> NamedSharding:
    """The sharding over a mesh of `shape` with the axes x, y, z; `order` -1 takes the devices in reverse."""
    devices = np.array(jax.devices()[: math.prod(shape)][::order]).reshape(shape)
    return NamedSharding(Mesh(devices, ("x", "y", "z")[: len(shape)]), spec, memory_kind=memory_kind)


def numbered(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """An array of that shape whose elements differ as far as the dtype allows."""
    bits = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    return (bits % 251).astype(dtype) if np.dtype(dtype).itemsize < 4 else bits.astype(dtype)


def struct(array: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def assert_same(found: Any, expected: Any) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def assert_on(found: jax.Array, sharding: Sharding, expected: Any) -> None:
    """Every shard, on its device and in its memory, holds its part of `expected`."""
    assert found.sharding == sharding
    assert found.sharding.memory_kind == sharding.memory_kind
    for shard in found.addressable_shards:
        assert_same(shard.data, np.asarray(expected)[shard.index])


def data_of(checkpoint: Path) -> Path:
    return checkpoint / f"d-{jaxckpt.describe(checkpoint).attempt}"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def serialize(arrays: Any, paths: Any, **keywords: Any) -> None:
    asyncio.run(jaxckpt.async_serialize(arrays, paths, **keywords))


def deserialize(paths: Any, like: Any, **keywords: Any) -> Any:
    return asyncio.run(jaxckpt.async_deserialize(paths, like, **keywords))


# From one sharding onto another

ON_8 = [
    ((8,), P("x")),
    ((8,), P(None, "x")),
    ((4, 2), P("x", "y")),
    ((4, 2), P("y", "x")),
    ((2, 4), P(("x", "y"))),
    ((2, 4), P(None, ("y", "x"))),
    ((2, 2, 2), P("z", None, "x")),
    ((8,), P()),
]
ANYWHERE = [
    ((1,), P()),
    ((2,), P("x")),
    ((2,), P(None, None, "x")),
    ((4,), P(None, "x")),
    ((2, 2), P("y", "x")),
    ((2, 2), P(None, "y")),
    ((4, 2), P("y", "x")),
    ((2, 4), P(("y", "x"))),
    ((2, 2, 2), P("x", "z", "y")),
    ((8,), P()),
]


@pytest.mark.parametrize("pack_below_bytes", [0, MIB], ids=["alone", "packed"])
@pytest.mark.parametrize(("mesh", "spec"), ON_8, ids=str)
def test_what_8_devices_saved_is_restored_on_1_2_4_and_8(
    tmp_path: Path, mesh: tuple[int, ...], spec: P, pack_below_bytes: int
) -> None:
    values = numbered((16, 24, 8))
    tree = {"w": jax.device_put(values, over(mesh, spec))}
    jaxckpt.save(tmp_path / "c", tree, options=SaveOptions(pack_below_bytes=pack_below_bytes, chunk_bytes=4096))
    for (shape, target), order in itertools.product(ANYWHERE, (1, -1)):
        sharding = over(shape, target, order=order)
        for wish in (sharding, struct(values, sharding), jax.device_put(jnp.zeros_like(values), sharding)):
            assert_on(jaxckpt.restore(tmp_path / "c", {"w": wish})["w"], sharding, values)
    assert_same(jaxckpt.restore(tmp_path / "c")["w"], values)
    assert_same(jaxckpt.restore(tmp_path / "c", {"w": np.zeros_like(values)})["w"], values)
    single = SingleDeviceSharding(jax.devices()[5])
    assert_on(jaxckpt.restore(tmp_path / "c", {"w": single})["w"], single, values)


@pytest.mark.parametrize("options", [None, SaveOptions(pack_below_bytes=0)], ids=["packed", "alone"])
def test_what_8_devices_saved_is_restored_by_a_process_with_one(
    tmp_path: Path, run_script: Callable[..., Any], options: SaveOptions | None
) -> None:
    tree = {
        "sharded": jax.device_put(numbered((16, 8)), over((4, 2), P("x", "y"))),
        "replicated": jax.device_put(numbered((3, 5), jnp.bfloat16), over((8,), P())),
        "partly": jax.device_put(numbered((4, 5), np.int8), over((4, 2), P("x"))),
        "there": jax.device_put(numbered((7,)), jax.devices()[6]),
        "numpy": numbered((2, 3), np.int64),
        "key": jax.random.key(3),
    }
    jaxckpt.save(tmp_path / "c", tree, options=options)
    np.savez(
        tmp_path / "expected.npz",
        **{
            name: np.asarray(jnp.float32(leaf) if name == "replicated" else leaf)
            for name, leaf in tree.items()
            if name != "key"
        },
    )
    done = run_script(
        """
        import jax, jax.numpy as jnp, numpy as np, jaxckpt

        assert len(jax.devices()) == 1
        expected = np.load("expected.npz")
        found = jaxckpt.restore("c")
        for name in expected:
            dtype = {"replicated": "bfloat16", "partly": "int8", "numpy": "int64"}.get(name, "float32")
            assert found[name].dtype == dtype, name
            np.testing.assert_array_equal(np.asarray(found[name]).astype(expected[name].dtype), expected[name])
            assert isinstance(found[name], np.ndarray if name == "numpy" else jax.Array)
        assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(3))).all()
        again = jaxckpt.restore("c", found)
        assert (again["sharded"] == found["sharded"]).all()
        """,
        devices=1,
    )
    assert done.returncode == 0, done.stderr


def mixed() -> dict[str, Any]:
    explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    return {
        "sharded": jax.device_put(numbered((16, 8)), over((4, 2), P("x", "y"))),
        "replicated": jax.device_put(numbered((6, 5)), over((8,), P())),
        "partly replicated": jax.device_put(numbered((8, 3)), over((4, 2), P("y"))),
        "on an axis of size 1": jax.device_put(numbered((5, 8)), over((1, 8), P("x", "y"))),
        "on one device": jax.device_put(numbered((3, 3)), jax.devices()[4]),
        "on half of the devices": jax.device_put(numbered((8,)), over((4,), P("x"), order=-1)),
        "on explicit axes": jax.device_put(numbered((8, 4)), NamedSharding(explicit, P("x", "y"))),
        "unbound": jnp.asarray(numbered((4, 4))),
        "0-d": jax.device_put(np.float32(3), over((8,), P())),
        "empty": jax.device_put(np.zeros((8, 0), np.float32), over((8,), P("x"))),
        "int4": jax.device_put(numbered((8, 6), np.int8).astype(jnp.int4), over((2, 4), P("x"))),
        "bool": jax.device_put(numbered((8,)) % 2 == 0, over((8,), P("x"))),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), over((8,), P("x"))),
        "numpy": numbered((5, 7), np.float64),
        "numpy scalar": np.int16(3),
        "value": 3.5,
    }


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("pack_below_bytes", [0, 100, MIB])
def test_leaves_of_every_placement_share_one_tree(tmp_path: Path, transfer: Any, pack_below_bytes: int) -> None:
    tree = mixed()
    jaxckpt.save(tmp_path / "c", tree, options=SaveOptions(transfer=transfer, pack_below_bytes=pack_below_bytes))
    for like in (None, tree):
        found = jaxckpt.restore(tmp_path / "c", like)
        for name, leaf in tree.items():
            if name == "keys":
                assert_same(jax.random.key_data(found[name]), jax.random.key_data(leaf))
            elif isinstance(leaf, jax.Array):
                assert_same(found[name], leaf)
            else:
                assert type(found[name]) is type(leaf)
                assert np.array_equal(found[name], leaf)
            if like is not None and isinstance(leaf, jax.Array):
                assert found[name].sharding == leaf.sharding
                assert found[name].committed == leaf.committed


def test_a_mesh_in_force_does_not_matter(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    values = numbered((8, 4))
    with jax.set_mesh(mesh):
        jaxckpt.save(tmp_path / "c", {"w": jax.device_put(values, NamedSharding(mesh, P("x", "y"))), "v": values})
        assert_same(jaxckpt.restore(tmp_path / "c")["w"], values)
        like = {"w": NamedSharding(mesh, P("y")), "v": jax.ShapeDtypeStruct((8, 4), np.float32)}
        assert_on(jaxckpt.restore(tmp_path / "c", like)["w"], like["w"], values)


@pytest.mark.parametrize("wish", ["sharding", "struct"])
def test_a_sharding_that_does_not_divide_the_leaf_is_an_error_that_names_it(tmp_path: Path, wish: str) -> None:
    values = numbered((6, 4))
    jaxckpt.save(tmp_path / "c", {"layer": {"w": values}})
    sharding = over((4,), P("x"))
    like = {"layer": {"w": sharding if wish == "sharding" else struct(values, sharding)}}
    with pytest.raises(
        LeafMismatchError, match=r"leaf layer/w: the sharding in `like` does not fit its shape \(6, 4\)"
    ):
        jaxckpt.restore(tmp_path / "c", like)


def test_a_sharding_of_more_axes_than_the_leaf_is_an_error_that_names_it(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w": numbered((8,))})
    with pytest.raises(LeafMismatchError, match=r"leaf w: the sharding in `like` does not fit its shape \(8,\)"):
        jaxckpt.restore(tmp_path / "c", {"w": over((4, 2), P("x", "y"))})


# Memory kinds


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("pack_below_bytes", [0, MIB], ids=["alone", "packed"])
@pytest.mark.parametrize(
    ("kind", "max_host_bytes"), [("pinned_host", None), ("pinned_host", MIB), ("unpinned_host", None)]
)
def test_a_memory_kind_is_kept(
    tmp_path: Path, transfer: Any, pack_below_bytes: int, max_host_bytes: int | None, kind: str
) -> None:
    large, small = numbered((64, 8192)), numbered((8, 6))
    shardings = {
        "large": over((4, 2), P("x", "y"), memory_kind=kind),
        "large replicated": over((8,), P(), memory_kind=kind),
        "large partly": over((2, 4), P("x"), memory_kind=kind),
        "small": over((8,), P("x"), memory_kind=kind),
        "single": SingleDeviceSharding(jax.devices()[2], memory_kind=kind),
    }
    values = {name: large if name.startswith("large") else small for name in shardings}
    tree = {name: jax.device_put(values[name], sharding) for name, sharding in shardings.items()}
    options = SaveOptions(transfer=transfer, pack_below_bytes=pack_below_bytes, max_host_bytes=max_host_bytes)
    jaxckpt.save(tmp_path / "c", tree, options=options)
    restoring = RestoreOptions(max_host_bytes=max_host_bytes)
    for like in (tree, shardings):
        found = jaxckpt.restore(tmp_path / "c", like, options=restoring)
        for name, sharding in shardings.items():
            assert_on(found[name], sharding, values[name])
    elsewhere = {name: over((2,), P(None, "x")) for name in shardings}
    for name, array in jaxckpt.restore(tmp_path / "c", elsewhere, options=restoring).items():
        assert_on(array, elsewhere[name], values[name])
    for name, array in jaxckpt.restore(tmp_path / "c").items():
        assert array.sharding.memory_kind == jax.devices()[0].default_memory().kind
        assert_same(array, values[name])


def test_a_leaf_larger_than_the_budget_is_restored_to_unpinned_memory(
    tmp_path: Path, run_script: Callable[..., Any]
) -> None:
    jaxckpt.save(tmp_path / "c", {"w": numbered((64, 8192))})
    done = run_script(  # in a process of its own, which XLA once aborted
        """
        import jax, numpy as np, jaxckpt
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"), memory_kind="unpinned_host")
        found = jaxckpt.restore("c", {"w": sharding}, options=jaxckpt.RestoreOptions(max_host_bytes=1 << 20))["w"]
        assert found.sharding.memory_kind == "unpinned_host"
        np.testing.assert_array_equal(found, np.arange(64 * 8192, dtype=np.float32).reshape(64, 8192))
        """
    )
    assert done.returncode == 0, done.stderr[:2000]


@pytest.mark.parametrize("max_host_bytes", [None, MIB])
def test_what_devices_saved_is_restored_to_pinned_memory(tmp_path: Path, max_host_bytes: int | None) -> None:
    values = numbered((128, 8192), jnp.bfloat16)
    jaxckpt.save(tmp_path / "c", {"w": jax.device_put(values, over((8,), P(None, "x")))})
    sharding = over((4, 2), P("x"), memory_kind="pinned_host")
    options = RestoreOptions(max_host_bytes=max_host_bytes, cast=True)
    assert_on(jaxckpt.restore(tmp_path / "c", {"w": sharding}, options=options)["w"], sharding, values)
    like = {"w": jax.ShapeDtypeStruct(values.shape, np.float32, sharding=sharding)}
    assert_on(jaxckpt.restore(tmp_path / "c", like, options=options)["w"], sharding, values.astype(np.float32))


# Awkward shapes


@pytest.mark.parametrize("transfer", ["direct", "staged"])
@pytest.mark.parametrize(
    ("shape", "mesh", "spec"),
    [
        ((1, 2**20), (1,), P()),
        ((1, 2**20), (8,), P(None, "x")),
        ((1, 2**20), (1, 8), P("x", "y")),
        ((2**20, 1), (8,), P("x")),
        ((2**20,), (8,), P("x")),
        ((1, 1, 2**18, 1), (4,), P(None, None, "x")),
        ((8, 2**17), (8,), P("x")),
        ((1009, 1013), (1,), P()),
        ((1009, 8 * 127), (8,), P(None, "x")),
        ((8 * 127, 1009), (8,), P("x")),
        ((7, 11, 13, 8 * 17), (8,), P(None, None, None, "x")),
        ((3, 8 * 5, 7, 11, 13), (8,), P(None, "x")),
        ((1000003,), (8,), P()),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk_bytes", [4096, 65536, 1 << 20])
def test_chunks_of_awkward_shapes_stay_within_the_target(
    tmp_path: Path, shape: tuple[int, ...], mesh: tuple[int, ...], spec: P, chunk_bytes: int, transfer: Any
) -> None:
    if math.prod(shape) // chunk_bytes > 128:
        shape = tuple(n // 8 if n % 64 == 0 and n > 1024 else n for n in shape)
    values = numbered(shape)
    tree = {"w": jax.device_put(values, over(mesh, spec))}
    options = SaveOptions(transfer=transfer, pack_below_bytes=0, chunk_bytes=chunk_bytes)
    info = jaxckpt.save(tmp_path / "c", tree, options=options)
    chunk = info.leaves[0].chunk
    assert chunk is not None
    assert math.prod(chunk) * 4 <= chunk_bytes
    shard = tree["w"].sharding.shard_shape(shape)
    assert all(n % c == 0 for n, c, whole in zip(shard, chunk, shape, strict=True) if n != whole)
    files = [path for path in data_of(tmp_path / "c").glob("arrays/w/c*") if path.is_file()]
    assert {path.stat().st_size for path in files} == {math.prod(chunk) * 4}
    assert_same(jaxckpt.restore(tmp_path / "c")["w"], values)
    assert_on(jaxckpt.restore(tmp_path / "c", tree)["w"], tree["w"].sharding, values)


def test_a_sharded_axis_with_no_divisor_of_a_useful_size_comes_back(tmp_path: Path) -> None:
    values = numbered((8 * 131071,), np.int8)  # a Mersenne prime a shard
    tree = {"w": jax.device_put(values, over((8,), P("x")))}
    jaxckpt.save(tmp_path / "c", tree, options=SaveOptions(pack_below_bytes=0, chunk_bytes=4096, max_host_bytes=MIB))
    assert_on(jaxckpt.restore(tmp_path / "c", tree)["w"], tree["w"].sharding, values)


# The three transfers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pack_below_bytes": 0, "chunk_bytes": 4096},
        {"pack_below_bytes": 4096, "max_host_bytes": MIB},
        {"pack_below_bytes": 0, "max_host_bytes": MIB},
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["save", "start_save"])
def test_every_transfer_writes_the_same_bytes(tmp_path: Path, options: dict[str, int], call: str) -> None:
    tree = mixed() | {
        "large": jax.device_put(numbered((64, 4096)), over((4, 2), P("x", "y"))),
        "larger than half of the budget": jax.device_put(numbered((2, 1 << 17)), jax.devices()[1]),
        "large int4": jax.device_put(numbered((64, 1024), np.int8).astype(jnp.int4), over((4, 2), P("y", "x"))),
        "pinned": jax.device_put(numbered((64, 512)), over((8,), P("x"), memory_kind="pinned_host")),
        "large numpy": np.asfortranarray(numbered((64, 2048))),
    }
    found = {}
    for transfer in TRANSFERS:
        chosen = SaveOptions(transfer=transfer, **options)
        if call == "save":
            jaxckpt.save(tmp_path / transfer, tree, options=chosen)
        else:
            jaxckpt.start_save(tmp_path / transfer, tree, options=chosen).result()
        found[transfer] = contents(data_of(tmp_path / transfer))
        assert "index-0.json" in found[transfer]
    for transfer in TRANSFERS:
        assert found[transfer].keys() == found["auto"].keys()
        assert [name for name in found["auto"] if found[transfer][name] != found["auto"][name]] == []


@pytest.mark.parametrize("options", [{}, {"chunk_bytes": 4096}, {"max_host_bytes": MIB}], ids=str)
def test_every_transfer_of_async_serialize_writes_the_same_bytes(tmp_path: Path, options: dict[str, int]) -> None:
    arrays = {name: leaf for name, leaf in mixed().items() if isinstance(leaf, jax.Array) and name != "keys"}
    for transfer in TRANSFERS:
        paths = {name: tmp_path / transfer / name for name in arrays}
        serialize(arrays, paths, options=SaveOptions(transfer=transfer, **options))
        assert anonymous(contents(tmp_path / transfer)) == anonymous(contents(tmp_path / "auto"))


def anonymous(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of arrays without what says which attempt wrote them, and the hash of that."""
    marks = rb'"(attempt|xxh3_128)": ?"[0-9a-f]{32}"'
    return {
        name: re.sub(marks, b"", data) if name.endswith(".json") else data  # the chunks as they are
        for name, data in files.items()
    }


# Anything onto anything

DTYPES = ["float32", "bfloat16", "int8", "uint4", "int4", "float8_e4m3fn", "bool", "complex64", "uint16", "int32"]


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> Sharding:
    """A mesh of 1 to 8 devices, in any order, and a spec that divides `shape`."""
    axes = draw(st.sampled_from([(1,), (2,), (4,), (8,), (1, 8), (2, 2), (2, 4), (4, 2), (1, 4), (2, 2, 2), (8, 1, 1)]))
    names = ["x", "y", "z"][: len(axes)]
    devices = draw(st.permutations(jax.devices()))[: math.prod(axes)]
    if len(devices) == 1 and draw(st.booleans()):
        return SingleDeviceSharding(devices[0])
    spec: list[Any] = [[] for _ in shape]
    sizes = [1] * len(shape)
    for name, size in draw(st.permutations(list(zip(names, axes, strict=True)))):
        dims = [dim for dim, n in enumerate(shape) if n % (sizes[dim] * size) == 0]
        dim = draw(st.sampled_from([None, *dims]))
        if dim is not None:
            spec[dim].append(name)
            sizes[dim] *= size
    parts = [tuple(names) if len(names) > 1 else names[0] if names else None for names in spec]
    kind = draw(st.sampled_from([None, None, None, "pinned_host"]))
    return NamedSharding(Mesh(np.array(devices).reshape(axes), names), P(*parts), memory_kind=kind)


lengths = st.one_of(st.sampled_from([1, 2, 4, 8, 16, 24, 32]), st.integers(0, 40))


@st.composite
def moves(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Sharding, Sharding]:
    """An array, where it was, and where it goes."""
    shape = tuple(draw(st.lists(lengths, max_size=3)))
    values = numbered(shape, draw(st.sampled_from(DTYPES)))
    return values, draw(shardings(shape)), draw(shardings(shape))


saving = st.builds(
    SaveOptions,
    transfer=st.sampled_from(TRANSFERS),
    pack_below_bytes=st.sampled_from([0, 0, 1000, MIB]),
    chunk_bytes=st.sampled_from([4096, 4096, 16384, 128 * MIB]),
    max_host_bytes=st.sampled_from([None, MIB]),
)
restoring = st.builds(
    RestoreOptions,
    verify=st.booleans(),
    memory_map=st.booleans(),
    max_host_bytes=st.sampled_from([None, MIB]),
)


@settings(max_examples=40, deadline=None)
@given(moved=st.lists(moves(), min_size=1, max_size=3), saving=saving, restoring=restoring)
def test_any_array_on_any_sharding_is_restored_onto_any_other(
    tmp_path_factory: pytest.TempPathFactory, moved: list[Any], saving: SaveOptions, restoring: RestoreOptions
) -> None:
    path = tmp_path_factory.mktemp("any")
    tree = [jax.device_put(values, origin) for values, origin, _ in moved]
    like = [target for values, _, target in moved]
    jaxckpt.save(path / "c", tree, options=saving)
    found = jaxckpt.restore(path / "c", like, options=restoring)
    for array, sharding, (values, _, _) in zip(found, like, moved, strict=True):
        assert_on(array, sharding, values)
    for array, (values, _, _) in zip(jaxckpt.restore(path / "c", options=restoring), moved, strict=True):
        assert_same(array, values)
    del found, array
    shutil.rmtree(path)


@settings(max_examples=25, deadline=None)
@given(moved=st.lists(moves(), min_size=1, max_size=3), saving=saving, restoring=restoring)
def test_any_array_goes_through_async_serialize_onto_any_sharding(
    tmp_path_factory: pytest.TempPathFactory, moved: list[Any], saving: SaveOptions, restoring: RestoreOptions
) -> None:
    path = tmp_path_factory.mktemp("any")
    arrays = [jax.device_put(values, origin) for values, origin, _ in moved]
    paths = [path / str(number) for number in range(len(arrays))]
    like = [struct(values, target) for values, _, target in moved]
    serialize(arrays, paths, options=saving)
    for array, wish, (values, _, _) in zip(deserialize(paths, like, options=restoring), like, moved, strict=True):
        assert_on(array, wish.sharding, values)
    shutil.rmtree(path)


# Plain Zarr

STORED = {
    "float32": "float32",
    "bfloat16": "uint16",
    "float16": "float16",
    "float8_e4m3fn": "uint8",
    "int4": "uint8",
    "uint2": "uint8",
    "bool": "bool",
    "complex64": "complex64",
    "int32": "int32",
    "uint8": "uint8",
}


@pytest.mark.parametrize("call", ["save", "async_serialize"])
@pytest.mark.parametrize(("dtype", "stored"), STORED.items(), ids=STORED.keys())
@pytest.mark.parametrize("shape", [(16, 24), (1009, 8), (8, 1, 5), ()], ids=str)
def test_other_readers_of_zarr_see_the_array(
    tmp_path: Path, dtype: str, stored: str, shape: tuple[int, ...], call: str
) -> None:
    values = numbered(shape, np.int32).astype(np.uint8).astype(dtype)
    sharding = over((8,), P(*[("x" if n == 8 or n == 16 else None) for n in shape]) if shape else P())
    array = jax.device_put(values, sharding)
    options = SaveOptions(pack_below_bytes=0, chunk_bytes=4096)
    if call == "save":
        jaxckpt.save(tmp_path / "c", {"layer": {"w": array}}, options=options)
        directory = data_of(tmp_path / "c") / "arrays" / "layer" / "w"
    else:
        directory = tmp_path / "w"
        serialize([array], [directory], options=options)
    expected = np.asarray(array).view(stored) if shape else np.asarray(array).reshape(1).view(stored).reshape(())
    opened = zarr.open_array(directory, mode="r")
    assert (opened.dtype, opened.shape) == (expected.dtype, expected.shape)
    assert np.asarray(opened[...]).tobytes() == expected.tobytes()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/"}}
    with_tensorstore = ts.open(spec, read=True).result()
    assert (with_tensorstore.dtype.numpy_dtype, with_tensorstore.shape) == (expected.dtype, expected.shape)
    assert with_tensorstore.read().result().tobytes() == expected.tobytes()


def test_a_pack_is_a_plain_zarr_array_of_bytes(tmp_path: Path) -> None:
    tree = {"a": jax.device_put(numbered((8, 4)), over((8,), P("x"))), "b": numbered((3,), np.int16)}
    jaxckpt.save(tmp_path / "c", tree)
    [pack] = data_of(tmp_path / "c").glob("packs/*")
    opened = np.asarray(zarr.open_array(pack, mode="r")[...])
    assert opened.dtype == np.uint8
    for leaf in jax.tree.leaves(tree):
        raw = np.asarray(leaf).tobytes()
        assert raw[:16] in opened.tobytes()


# async_serialize


def test_async_serialize_and_back_onto_another_sharding(tmp_path: Path) -> None:
    tree = {name: leaf for name, leaf in mixed().items() if isinstance(leaf, jax.Array) and name != "keys"}
    tree |= {"numpy": numbered((5, 7), np.float64), "fortran": np.asfortranarray(numbered((5, 7)))}
    paths = {name: tmp_path / "arrays" / name for name in tree}
    serialize(tree, paths)
    assert {path.name for path in (tmp_path / "arrays").iterdir()} == set(tree)
    for name, array in deserialize(paths, tree).items():
        assert isinstance(array, jax.Array) == isinstance(tree[name], jax.Array)
        assert_same(array, tree[name])
        if isinstance(array, jax.Array):
            assert array.sharding == tree[name].sharding
    like = {name: over((2, 2), P(), order=-1) for name in tree if name != "numpy"}
    found = deserialize({name: paths[name] for name in like}, like)
    for name, sharding in like.items():
        assert_on(found[name], sharding, tree[name])


@pytest.mark.parametrize("spelling", [str, lambda path: path, lambda path: f"file://{path}", lambda path: f"{path}/"])
def test_paths_are_strings_path_objects_or_urls(tmp_path: Path, spelling: Callable[[Path], Any]) -> None:
    arrays = [jnp.arange(4), jnp.ones((2, 2))]
    paths = [spelling(tmp_path / "a dir" / "a"), spelling(tmp_path / "b")]
    serialize(arrays, paths)
    for found, expected in zip(deserialize(tuple(paths), arrays), arrays, strict=True):
        assert_same(found, expected)


def test_paths_in_a_sequence_match_the_arrays_of_a_tree_in_order(tmp_path: Path) -> None:
    tree = {"b": jnp.arange(3), "a": {"c": jnp.ones(2)}}
    serialize(tree, [tmp_path / "first", tmp_path / "second"])
    assert_same(deserialize([tmp_path / "first"], [tree["a"]["c"]])[0], tree["a"]["c"])
    found = deserialize([tmp_path / "first", tmp_path / "second"], tree)
    assert_same(found["b"], tree["b"])


def test_one_array_and_one_path_need_no_list(tmp_path: Path) -> None:
    serialize(jnp.arange(5), tmp_path / "w")
    assert_same(deserialize(tmp_path / "w", jnp.zeros(5, jnp.int32)), jnp.arange(5))


def test_no_arrays_are_no_work(tmp_path: Path) -> None:
    serialize([], [])
    assert deserialize([], []) == []


@pytest.mark.parametrize("shape", [(0,), (0, 3), (8, 0), (2, 0, 4)], ids=str)
def test_async_serialize_keeps_arrays_without_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = jnp.zeros(shape, jnp.bfloat16)
    serialize([array], [tmp_path / "w"])
    assert_same(deserialize([tmp_path / "w"], [array])[0], array)
    assert zarr.open_array(tmp_path / "w", mode="r").shape == shape


def test_an_array_is_not_overwritten_unless_that_is_asked_for(tmp_path: Path) -> None:
    old, new = jnp.arange(64.0).reshape(8, 8), jnp.ones((2, 2), jnp.bfloat16)
    options = SaveOptions(chunk_bytes=4096)
    serialize([jax.device_put(old, over((8,), P("x")))], [tmp_path / "w"], options=options)
    before = contents(tmp_path)
    with pytest.raises(CheckpointExistsError, match=r"an array is there already; .*overwrite=True") as caught:
        serialize([new, new], [tmp_path / "v", tmp_path / "w"])
    assert isinstance(caught.value, FileExistsError)
    assert str(tmp_path / "w") in str(caught.value)
    assert contents(tmp_path) == before
    assert not (tmp_path / "v").exists()
    serialize([new, new], [tmp_path / "v", tmp_path / "w"], overwrite=True)
    assert_same(deserialize([tmp_path / "w"], [new])[0], new)
    assert {path.name for path in (tmp_path / "w").iterdir()} == {"zarr.json", "index-0.json", "c.0.0"}
    with pytest.raises(LeafMismatchError, match=r"`like` has shape \(8, 8\), the checkpoint \(2, 2\)"):
        deserialize([tmp_path / "w"], [old])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("foreign", ["notes.txt", "c", "manifest.json", ".hidden", "zarr.json.bak", "c.0.0/nested"])
def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path, foreign: str, overwrite: bool) -> None:
    file = tmp_path / "w" / foreign
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    if foreign == "c":
        file.unlink()
        file.mkdir()
        (file / "0").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(CheckpointExistsError, match=f"the directory holds other files .*{re.escape(foreign[:5])}"):
        serialize([jnp.ones(2), jnp.ones(2)], [tmp_path / "v", tmp_path / "w"], overwrite=overwrite)
    assert contents(tmp_path) == before
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize("second", ["w", "./w", "w/", "../{}/w"])
def test_the_same_path_twice_is_refused(tmp_path: Path, second: str) -> None:
    paths = [str(tmp_path / "w"), f"{tmp_path}/{second.format(tmp_path.name)}"]
    with pytest.raises(ValueError, match="two arrays have the same path; every array needs a path of its own"):
        serialize([jnp.ones(2), jnp.zeros(2)], paths)
    assert contents(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_the_same_path_twice_through_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match="the same path"):
        serialize([jnp.ones(2), jnp.zeros(2)], [tmp_path / "real" / "w", tmp_path / "link" / "w"])
    assert contents(tmp_path) == {}


def test_one_path_inside_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path"):
        serialize([jnp.ones(2), jnp.zeros(2)], [tmp_path / "w", tmp_path / "w" / "v"])
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_arrays_and_paths_of_different_number_are_refused(tmp_path: Path, count: int) -> None:
    paths = [tmp_path / str(number) for number in range(count)]
    message = f"there are 2 arrays but {count} paths; expected one path for each array"
    with pytest.raises(LeafMismatchError, match=message) as caught:
        serialize([jnp.ones(2), jnp.zeros(2)], paths)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(LeafMismatchError, match=message):
        deserialize(paths, [jnp.ones(2), jnp.zeros(2)])
    assert list(tmp_path.iterdir()) == []


def test_trees_of_arrays_and_paths_that_do_not_match_are_refused(tmp_path: Path) -> None:
    arrays = {"a": jnp.ones(2), "b": jnp.zeros(2)}
    paths = {"a": tmp_path / "a", "c": tmp_path / "c"}
    with pytest.raises(ValueError, match="b"):
        serialize(arrays, paths)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["missing", "flipped", "shorter", "swapped"])
def test_async_deserialize_notices_altered_chunks(tmp_path: Path, change: str) -> None:
    array = jax.device_put(numbered((8, 128)), over((8,), P("x")))
    serialize([array], [tmp_path / "w"])
    chunk = tmp_path / "w" / "c.3.0"
    raw = bytearray(chunk.read_bytes())
    raw[7] ^= 1
    match change:
        case "missing":
            chunk.unlink()
        case "flipped":
            chunk.write_bytes(raw)
        case "shorter":
            chunk.write_bytes(raw[:-1])
        case _:
            shutil.copy(tmp_path / "w" / "c.4.0", chunk)
    with pytest.raises(CorruptCheckpointError, match=rf"leaf .*{re.escape(str(chunk))}"):
        deserialize([tmp_path / "w"], [array])
    rest = over((8,), P("x"))
    if change != "missing":
        options = RestoreOptions(verify=False)
        if change != "shorter":
            assert deserialize([tmp_path / "w"], [rest], options=options)[0].shape == (8, 128)


def test_a_zarr_array_of_somebody_else_is_refused(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "w", shape=(4,), dtype="float32")[:] = 1
    with pytest.raises(CorruptCheckpointError, match=r"not an array that jaxckpt wrote .*; open others with zarr"):
        deserialize([tmp_path / "w"], [jnp.ones(4)])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_zarr_array_of_somebody_else_is_not_half_removed(tmp_path: Path, overwrite: bool) -> None:
    zarr.create_array(tmp_path / "w", shape=(4,), dtype="float32")[:] = 1  # its chunk is the file c/0
    before = contents(tmp_path)
    with pytest.raises(CheckpointExistsError):
        serialize([jnp.ones(4)], [tmp_path / "w"], overwrite=overwrite)
    assert contents(tmp_path) == before


def test_an_array_that_was_never_finished_is_not_found_and_can_be_written_again(tmp_path: Path) -> None:
    serialize([jnp.arange(4)], [tmp_path / "w"])
    (tmp_path / "w" / "zarr.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no array: there is no zarr.json"):
        deserialize([tmp_path / "w"], [jnp.zeros(4, jnp.int32)])
    serialize([jnp.ones(4)], [tmp_path / "w"])
    assert_same(deserialize([tmp_path / "w"], [jnp.zeros(4)])[0], jnp.ones(4))


# Memory-mapped restores


def mapped_files(address: int) -> str:
    """The file that is mapped at `address`, or the empty string."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, _, _, _, *name = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last:
            return name[0] if name else ""
    return ""


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("pack_below_bytes", [0, MIB], ids=["alone", "packed"])
def test_a_memory_mapped_restore_copies_nothing(tmp_path: Path, pack_below_bytes: int, verify: bool) -> None:
    tree = {
        "sharded": jax.device_put(numbered((64, 256)), over((8,), P("x"))),
        "grid": jax.device_put(numbered((64, 256), jnp.bfloat16), over((4, 2), P("x", "y"))),
        "single": jax.device_put(numbered((33, 5)), jax.devices()[3]),
        "unbound": jnp.asarray(numbered((100,))),
        "numpy": numbered((7, 9), np.float64),
    }
    jaxckpt.save(tmp_path / "c", tree, options=SaveOptions(pack_below_bytes=pack_below_bytes))
    found = jaxckpt.restore(tmp_path / "c", tree, options=RestoreOptions(memory_map=True, verify=verify))
    for name, leaf in tree.items():
        assert_same(found[name], leaf)
        parts = [shard.data for shard in found[name].addressable_shards] if name != "numpy" else [found[name]]
        for part in parts:
            assert mapped_files(np.asarray(part).ctypes.data).startswith(str(tmp_path / "c" / "d-")), name
    assert not found["numpy"].flags.writeable


def test_a_memory_mapped_restore_onto_another_sharding_is_equal(tmp_path: Path) -> None:
    values = numbered((64, 256))
    jaxckpt.save(tmp_path / "c", {"w": jax.device_put(values, over((8,), P("x")))})
    for mesh, spec in ANYWHERE:
        sharding = over(mesh, P(*spec[:2]), order=-1)
        found = jaxckpt.restore(tmp_path / "c", {"w": sharding}, options=RestoreOptions(memory_map=True))["w"]
        assert_on(found, sharding, values)


@pytest.mark.parametrize("memory_map", [False, True])
def test_restored_arrays_can_be_donated(tmp_path: Path, run_script: Callable[..., Any], memory_map: bool) -> None:
    sharded = jax.device_put(numbered((64, 256)), over((8,), P("x")))
    replicated = jax.device_put(numbered((64, 256)), over((8,), P()))
    jaxckpt.save(tmp_path / "c", {"s": sharded, "r": replicated}, options=SaveOptions(pack_below_bytes=0))
    before = contents(tmp_path / "c")
    done = run_script(
        f"""
        import jax, numpy as np, jaxckpt
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        mesh = Mesh(np.array(jax.devices()), ("x",))
        like = {{"s": NamedSharding(mesh, P("x")), "r": NamedSharding(mesh, P())}}
        options = jaxckpt.RestoreOptions(memory_map={memory_map})
        first = jaxckpt.restore("c", like, options=options)
        second = jaxckpt.restore("c", like, options=options)
        expected = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
        step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
        for _ in range(3):
            first = step(first)
        for tree, wanted in ((first, 8 * expected + 7), (second, expected)):
            for array in tree.values():
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(shard.data, wanted[shard.index])
        """
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "c") == before


def test_memory_mapped_arrays_outlive_the_checkpoint(tmp_path: Path) -> None:
    values = numbered((64, 256))
    jaxckpt.save(tmp_path / "c", {"w": values, "j": jnp.asarray(values)})
    found = jaxckpt.restore(tmp_path / "c", options=RestoreOptions(memory_map=True))
    jaxckpt.save(tmp_path / "c", {"w": values * 2, "j": jnp.asarray(values)}, overwrite=True)
    shutil.rmtree(tmp_path / "c")
    assert_same(found["w"], values)
    assert_same(found["j"], values)


def test_a_memory_mapped_restore_verifies_what_it_maps(tmp_path: Path) -> None:
    values = numbered((64, 256))
    jaxckpt.save(tmp_path / "c", {"w": values}, options=SaveOptions(pack_below_bytes=0))
    chunk = data_of(tmp_path / "c") / "arrays" / "w" / "c.0.0"
    raw = bytearray(chunk.read_bytes())
    raw[1000] ^= 1
    chunk.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=rf"leaf w: .*{re.escape(str(chunk))} do not match their hash"):
        jaxckpt.restore(tmp_path / "c", options=RestoreOptions(memory_map=True))
