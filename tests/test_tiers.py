"""Steps are durable in a near directory first, and uploaded in the background."""

import shutil
import uuid
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import Checkpointer, _copy


def tree(step: int) -> dict[str, Any]:
    return {"w": jnp.full(10, step)}


@pytest.fixture
def root() -> str:
    return f"memory://tiers/{uuid.uuid4().hex}"


def test_every_step_reaches_the_root_and_the_newest_alone_stays_near(root: str, tmp_path: Path) -> None:
    with Checkpointer(root, staging=tmp_path / "near", keep_last=3) as ckpt:
        for step in range(6):
            ckpt.save(step, tree(step))
    assert [path.name for path in (tmp_path / "near").iterdir()] == ["5"]
    assert Checkpointer(root).steps() == [3, 4, 5]
    assert all(jaxckpt.verify(f"{root}/{step}").ok for step in (3, 4, 5))


def test_the_nearest_sound_copy_is_restored(root: str, tmp_path: Path) -> None:
    with Checkpointer(root, staging=tmp_path / "near") as ckpt:
        ckpt.save(1, tree(1))
    again = Checkpointer(root, staging=tmp_path / "near")
    assert (again.restore()["w"] == 1).all()
    assert again.restored is not None
    assert again.restored.path == str(tmp_path / "near/1")
    again.close()
    data = next((tmp_path / "near/1").glob("d-*/packs/*/c.0"))
    data.write_bytes(b"damaged")
    again = Checkpointer(root, staging=tmp_path / "near")
    with pytest.warns(UserWarning, match="skipped a damaged copy of step 1: .*packs"):
        assert (again.restore()["w"] == 1).all()
    assert again.restored is not None
    assert again.restored.path == f"{root}/1"
    shutil.rmtree(tmp_path / "near")
    assert (Checkpointer(root, staging=tmp_path / "near").restore(1)["w"] == 1).all()


def test_what_an_ended_process_has_not_uploaded_the_next_one_uploads(root: str, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "near/1", tree(1))  # all that a process had done when it was killed
    jaxckpt.save(tmp_path / "near/2", tree(2))
    with Checkpointer(root, staging=tmp_path / "near") as ckpt:
        ckpt.wait()
        assert Checkpointer(root).steps() == [1, 2]
    assert [path.name for path in (tmp_path / "near").iterdir()] == ["2"]


def test_a_failed_upload_is_raised_once_and_tried_again(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise jaxckpt.StorageError(5, "the network is down", root)

    ckpt = Checkpointer(root, staging=tmp_path / "near")
    with monkeypatch.context() as broken:
        broken.setattr(_copy, "copy", fails)
        ckpt.save(1, tree(1))
        with pytest.raises(jaxckpt.StorageError, match="the network is down"):
            ckpt.wait()
    assert ckpt.steps() == [1]
    ckpt.save(2, tree(2))
    ckpt.close()
    assert Checkpointer(root).steps() == [1, 2]


def test_a_save_waits_when_too_many_steps_are_to_be_uploaded(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = _copy.copy

    async def slow(*arguments: Any, **named: Any) -> Any:
        import asyncio

        await asyncio.sleep(0.3)
        return await original(*arguments, **named)

    monkeypatch.setattr(_copy, "copy", slow)
    staged = []
    with Checkpointer(root, staging=tmp_path / "near", max_staged=1) as ckpt:
        for step in range(4):
            ckpt.save(step, tree(step))
            staged.append(len(list((tmp_path / "near").iterdir())))
    assert max(staged) <= 3  # one that is uploaded, one that waits, one in flight
    assert Checkpointer(root).steps() == [0, 1, 2, 3]


def test_a_step_that_was_uploaded_before_is_not_saved_again(root: str, tmp_path: Path) -> None:
    with Checkpointer(root, staging=tmp_path / "near") as ckpt:
        ckpt.save(1, tree(1))
    shutil.rmtree(tmp_path / "near")
    with Checkpointer(root, staging=tmp_path / "near") as ckpt:
        with pytest.raises(jaxckpt.CheckpointExistsError, match="step 1 was saved before"):
            ckpt.save(1, tree(7))
        ckpt.save(1, tree(7), overwrite=True)
    assert (jaxckpt.restore(f"{root}/1")["w"] == 7).all()
