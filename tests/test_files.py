"""The data files that people have <-> trees, with real files and the libraries that own the formats."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxckpt
from jaxckpt._files import check_dest, read_source, write_dest

NUMPY_DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64"
ML_DTYPES = "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"


def of_every_byte(dtype: str) -> np.ndarray[Any, Any]:
    raw = np.arange(256, dtype=np.uint8)
    return (raw % 2).astype(bool) if dtype == "bool" else raw.view(np.dtype(dtype)).reshape(4, -1)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("suffix", "dtypes"),
    [(".safetensors", f"{NUMPY_DTYPES} {ML_DTYPES}"), (".npz", f"{NUMPY_DTYPES} complex128")],
)
def test_every_dtype_that_the_format_has_round_trips(tmp_path: Path, suffix: str, dtypes: str) -> None:
    tree = {dtype: of_every_byte(dtype) for dtype in dtypes.split()}
    write_dest(tmp_path / f"all{suffix}", tree)
    assert_same(read_source(tmp_path / f"all{suffix}"), tree)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_flat_dict_keeps_its_names_shapes_and_layouts(tmp_path: Path, suffix: str) -> None:
    tree = {
        "encoder.layer.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a/b": np.full(1, 7, np.float32),
        "": np.zeros(2),
        "file": np.array(3.0),
        "empty": np.zeros((0, 3), np.float32),
        "transposed": np.arange(6).reshape(2, 3).T,
        "strided": np.arange(10)[::3],
        "é\n": np.ones(1),
    }
    write_dest(tmp_path / f"names{suffix}", tree)
    assert_same(read_source(tmp_path / f"names{suffix}"), tree)


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_nested_tree_is_named_by_its_key_paths(tmp_path: Path, suffix: str) -> None:
    tree = {"layers": [jnp.ones(2), {"w.0": jnp.zeros(3)}], "p": Point(np.float32(1), 2), "none": None}
    write_dest(tmp_path / f"tree{suffix}", tree)
    found = read_source(tmp_path / f"tree{suffix}")
    assert sorted(found) == ["layers/0", "layers/1/w.0", "p/x", "p/y"]
    assert found["p/y"].dtype == np.int64
    assert found["p/y"].shape == ()


def test_a_bare_array_is_called_as_numpy_calls_it(tmp_path: Path) -> None:
    write_dest(tmp_path / "a.npz", jnp.arange(3))
    assert np.load(tmp_path / "a.npz")["arr_0"].tolist() == [0, 1, 2]


def test_other_programs_read_what_is_written(tmp_path: Path) -> None:
    tree = {"a.b": np.arange(4.0), "allow_pickle": np.zeros((2, 2), np.int8)}
    write_dest(tmp_path / "t.safetensors", tree)
    write_dest(tmp_path / "t.npz", tree)
    write_dest(tmp_path / "t.npy", tree["a.b"])
    assert_same(safetensors.numpy.load_file(tmp_path / "t.safetensors"), tree)
    with np.load(tmp_path / "t.npz") as archive:
        assert_same(dict(archive), tree)
    assert np.load(tmp_path / "t.npy").tolist() == [0, 1, 2, 3]


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    tree = {"a.b": np.arange(4.0), "c": np.zeros((0, 2), np.int8), "f": np.asfortranarray(np.ones((2, 3)))}
    safetensors.numpy.save_file({**tree, "f": np.ones((2, 3))}, tmp_path / "t.safetensors")
    np.savez_compressed(tmp_path / "t.npz", allow_pickle=False, **tree)
    np.save(tmp_path / "t.npy", tree["f"])
    assert_same(read_source(tmp_path / "t.safetensors"), tree)
    assert_same(read_source(tmp_path / "t.npz"), tree)
    assert_same({"f": read_source(tmp_path / "t.npy")}, {"f": tree["f"]})


def test_a_source_is_mapped_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 34,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + (4 << 34))
    assert read_source(tmp_path / "sparse.npy")[-1] == 0

    header = json.dumps({"x": {"dtype": "BF16", "shape": [1 << 34], "data_offsets": [0, 2 << 34]}}).encode()
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + (2 << 34))
    assert read_source(tmp_path / "sparse.safetensors")["x"][-1] == 0


def test_tensors_that_start_on_an_odd_byte_are_read(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    values = np.array([1.5, -2.0], np.float32)
    (tmp_path / "odd.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\7" + values.tobytes())
    assert_same(read_source(tmp_path / "odd.safetensors"), {"a": np.array([7], np.uint8), "b": values})


def test_the_metadata_of_safetensors_survives(tmp_path: Path) -> None:
    metadata = {"format": "pt", "author": "é"}
    safetensors.numpy.save_file({"x": np.ones(2)}, tmp_path / "a.safetensors", metadata=metadata)
    tree = read_source(tmp_path / "a.safetensors")
    assert tree["__metadata__"] == metadata
    write_dest(tmp_path / "b.safetensors", tree)
    with safetensors.safe_open(tmp_path / "b.safetensors", framework="numpy") as file:
        assert file.metadata() == metadata
        assert list(file.keys()) == ["x"]


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_metadata_is_left_out_of_a_format_that_lacks_it_with_a_warning(tmp_path: Path, suffix: str) -> None:
    tree = {"__metadata__": {"format": "pt"}, "x": np.ones(2)}
    with pytest.warns(UserWarning, match=rf"a\{suffix} cannot hold the file metadata \(format\): left out"):
        write_dest(tmp_path / f"a{suffix}", tree)
    found = read_source(tmp_path / f"a{suffix}")
    assert_same(found if suffix == ".npz" else {"x": found}, {"x": np.ones(2)})


def one(dtype: Any = float) -> np.ndarray[Any, Any]:
    return np.ones(1, dtype)


@pytest.mark.parametrize(
    ("suffix", "tree", "message"),
    [
        (".npz", {"a": {"note": "hi"}}, "leaf 'a/note' is of type str, which a file of arrays cannot hold"),
        (".safetensors", {"a": {"note": "hi"}}, "leaf 'a/note' is of type str, which a file of arrays cannot hold"),
        (".npy", {"a": one(), "b": one()}, "can hold one array, and the tree has 2; write .npz or .safetensors"),
        (".npy", {}, "can hold one array, and the tree has 0"),
        (".npz", {"a/b": one(), "a": {"b": one()}}, "two leaves are named 'a/b' in a file of arrays by name"),
        (".safetensors", {"a": [one()], "a/0": one()}, "two leaves are named 'a/0'"),
        (".npz", {"x": one(), "x.npy": one()}, "leaf 'x.npy': numpy.load takes it for 'x'"),
        (".npz", {"x\0y": one()}, "cannot hold a NUL in a name"),
        (".safetensors", {"__metadata__": one()}, "leaf '__metadata__' has a name that .safetensors reserves"),
        (".npz", {"w": one(jnp.bfloat16)}, "leaf 'w' has dtype bfloat16, which .npz cannot hold"),
        (".npy", one(jnp.float8_e5m2), "leaf 'arr_0' has dtype float8_e5m2, which .npy cannot hold"),
        (".safetensors", {"w": one(complex)}, "leaf 'w' has dtype complex128, which .safetensors cannot hold"),
        (".safetensors", {"w": one(jnp.int4)}, "leaf 'w' has dtype int4, which .safetensors cannot hold"),
        (".npz", {"big": 1 << 70}, "leaf 'big' has dtype object, which .npz cannot hold"),
        (".npz", {"o": one(object)}, "leaf 'o' has dtype object, which .npz cannot hold"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, suffix: str, tree: Any, message: str
) -> None:
    for refuse in (check_dest, write_dest):
        with pytest.raises(jaxckpt.UnsupportedLeafError) as caught:
            refuse(tmp_path / f"x{suffix}", tree)
        assert message in str(caught.value)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_prng_key_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(jaxckpt.UnsupportedLeafError, match="leaf 'rng' is a PRNG key.* save its jax.random.key_data"):
        write_dest(tmp_path / f"x{suffix}", {"rng": jax.random.key(0)})


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_arrays_of_python_objects_are_never_unpickled(tmp_path: Path, suffix: str) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (sys.exit, ("unpickled",))

    path = tmp_path / f"bomb{suffix}"
    bomb = np.array([Bomb()], dtype=object)
    if suffix == ".npz":
        np.savez(path, fine=np.ones(1), bad=bomb)
    else:
        np.save(path, bomb)
    with pytest.raises(jaxckpt.UnsupportedLeafError, match="holds Python objects") as caught:
        read_source(path)
    assert ("array 'bad'" if suffix == ".npz" else "bomb.npy") in str(caught.value)


def test_an_existing_file_stays_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"mine")
    for refuse in (check_dest, write_dest):
        with pytest.raises(jaxckpt.CheckpointExistsError, match="x.npy exists; choose another name, or overwrite it"):
            refuse(path, np.ones(2))
    assert path.read_bytes() == b"mine"
    write_dest(path, np.ones(2), overwrite=True)
    assert read_source(path).tolist() == [1, 1]
    assert names_in(tmp_path) == ["x.npy"]


def test_places_where_no_file_can_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.npy").mkdir()
    with pytest.raises(jaxckpt.CheckpointExistsError, match="d.npy is a directory"):
        write_dest(tmp_path / "d.npy", np.ones(1), overwrite=True)
    with pytest.raises(jaxckpt.StorageError, match="nowhere is not a directory"):
        check_dest(tmp_path / "nowhere" / "x.npy", np.ones(1))


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".npy"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"x{suffix}"
    write_dest(path, {"x": np.ones(2)})
    old = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(jaxckpt.StorageError, match=rf"cannot write .*x\{suffix}: No space left on device") as caught:
        write_dest(path, {"x": np.zeros(2)}, overwrite=True)
    assert caught.value.errno == 28
    assert path.read_bytes() == old
    assert names_in(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["model.bin", "model", "model.pkl"])
def test_an_unknown_suffix_is_an_error_that_lists_those_that_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(jaxckpt.CheckpointError, match=r"expected \.safetensors, \.npz or \.npy"):
        read_source(tmp_path / name)
    with pytest.raises(jaxckpt.CheckpointError, match=r"expected \.safetensors, \.npz or \.npy"):
        write_dest(tmp_path / name, {})


def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path) -> None:
    write_dest(tmp_path / "X.NPZ", {"x": np.ones(1)})
    assert_same(read_source(tmp_path / "X.NPZ"), {"x": np.ones(1)})


def test_without_the_safetensors_package_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(jaxckpt.CheckpointError, match=r"pip install 'jaxckpt\[safetensors\]'"):
        read_source(tmp_path / "x.safetensors")
    with pytest.raises(jaxckpt.CheckpointError, match=r"pip install 'jaxckpt\[safetensors\]'"):
        check_dest(tmp_path / "x.safetensors", {})


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".npy"])
def test_a_missing_file_is_a_missing_file(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        read_source(tmp_path / f"none{suffix}")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".npy"])
def test_a_damaged_file_is_read_right_or_refused_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    write_dest(path, {"x": np.arange(3, dtype=np.int16)})
    whole = path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 0x24]) + whole[at + 1 :] for at in range(len(whole))]
    cut = [whole[:at] for at in range(len(whole))]
    refused = 0
    for damaged in flipped + cut:
        path.write_bytes(damaged)
        try:
            read_source(path)
        except jaxckpt.CheckpointError as error:
            assert path.name in str(error)
            refused += 1
    assert refused > len(cut) // 2
