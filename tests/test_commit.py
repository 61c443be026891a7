"""A checkpoint is there whole or not at all, and says so when it is damaged."""

import asyncio
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, RestoreOptions

TREE = {"large": jnp.arange(2 << 20), "small": {"a": jnp.arange(10), "b": np.arange(7)}}


def same(found: object, tree: dict = TREE) -> bool:  # pyright: ignore
    flat = {"large": found["large"], **found["small"]}  # pyright: ignore
    return all(np.array_equal(flat[k], v) for k, v in {"large": tree["large"], **tree["small"]}.items())


def test_a_checkpoint_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"w": jnp.ones(3)})
    with pytest.raises(CheckpointExistsError, match="a checkpoint is there already; overwrite=True"):
        jaxckpt.save(tmp_path / "a", {"w": jnp.zeros(3)})
    assert jaxckpt.restore(tmp_path / "a")["w"].sum() == 3


def test_an_overwrite_leaves_one_data_directory(tmp_path: Path) -> None:
    for value in range(3):
        info = jaxckpt.save(tmp_path / "a", {"w": jnp.full(3, value)}, overwrite=True)
    assert sorted(os.listdir(tmp_path / "a")) == [f"d-{info.attempt}", "manifest.json"]
    assert jaxckpt.restore(tmp_path / "a")["w"].sum() == 6


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"the directory holds other files \(notes.txt\)"):
        jaxckpt.save(tmp_path, TREE, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_what_a_killed_save_left_is_invisible_and_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "a" / ("d-" + "0" * 32) / "arrays").mkdir(parents=True)
    (tmp_path / "a" / (".manifest.json." + "0" * 32)).write_text("{")
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint: there is no manifest.json"):
        jaxckpt.restore(tmp_path / "a")
    jaxckpt.save(tmp_path / "a", TREE)
    assert same(jaxckpt.restore(tmp_path / "a"))


def test_a_moved_a_copied_and_a_read_only_checkpoint_restores(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", TREE)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a").rename(tmp_path / "moved")
    for file in (tmp_path / "copy").rglob("*"):
        file.chmod(0o555 if file.is_dir() else 0o444)
    assert same(jaxckpt.restore(tmp_path / "moved"))
    assert same(jaxckpt.restore(tmp_path / "copy"))


def test_an_unknown_format_version_is_refused_by_its_number(tmp_path: Path) -> None:
    from jaxckpt import _manifest

    jaxckpt.save(tmp_path / "a", TREE)
    body = (tmp_path / "a" / "manifest.json").read_bytes().split(b'"manifest":', 1)[1].rstrip()[:-1]
    newer = body.replace(b'"format_version":1', b'"format_version":2')
    data = b'{"xxh3_128":"' + _manifest.digest(newer).encode() + b'","manifest":' + newer + b"}"
    (tmp_path / "a" / "manifest.json").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"format version 2, but this jaxckpt reads version 1"):
        jaxckpt.restore(tmp_path / "a")


def test_bytes_that_are_not_needed_are_not_looked_at(tmp_path: Path) -> None:
    info = jaxckpt.save(tmp_path / "a", TREE)
    (tmp_path / "a" / f"d-{info.attempt}" / "arrays" / "large" / "c.0").unlink()
    like = {"small": {"a": jnp.zeros(10, int)}}
    found = jaxckpt.restore(tmp_path / "a", like, options=RestoreOptions(partial=True))
    np.testing.assert_array_equal(found["small"]["a"], np.arange(10))


@pytest.mark.parametrize("spelled", ["relative", "./relative/", "with spaces", "file://{}/url", "~/home"])
def test_paths_are_what_a_shell_would_take_them_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    jaxckpt.save(spelled.format(tmp_path), {"w": jnp.ones(3)})
    assert len(list(tmp_path.glob("*/manifest.json"))) == 1
    assert jaxckpt.restore(spelled.format(tmp_path))["w"].sum() == 3
    assert jaxckpt.describe(spelled.format(tmp_path)).nbytes == 12


def test_several_processes_without_a_coordination_service_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for save in (
        lambda: jaxckpt.save(tmp_path / "a", TREE),
        lambda: asyncio.run(jaxckpt.async_serialize([TREE["large"]], [tmp_path / "a"])),
    ):
        with pytest.raises(jaxckpt.CheckpointError, match=r"one of 2 processes, but they have no coord"):
            save()
    assert list(tmp_path.iterdir()) == []
