"""The checkpoints of a training run: steps, retention, fallback, links, cadence, signals."""

import asyncio
import json
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt
from jaxckpt import (
    Checkpointer,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    KeepBest,
    SaveOptions,
    StorageError,
    _local,
)
from jaxckpt._options import Transfer
from jaxckpt._retention import Cadence, Cost, Retention, young_daly_seconds

SMALL = SaveOptions(pack_below_bytes=0, chunk_bytes=4096)


def tree(value: int) -> dict[str, jax.Array | int]:
    return {"w": jnp.full((4, 1024), value), "b": jnp.arange(3) + value, "step": value}


def flip(path: Path, name: str) -> Path:
    """Flip a bit of a data file of a checkpoint."""
    (file,) = path.glob(f"d-*/{name}")
    data = bytearray(file.read_bytes())
    data[3] ^= 4
    file.write_bytes(data)
    return file


# --- saving and restoring


def test_a_loop_saves_in_the_background_and_resumes_from_the_newest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.latest_step() is None
        assert ckpt.steps() == []
        for step in (5, 20, 10):
            pending = ckpt.save(step, tree(step), metrics={"loss": 1 / step}, metadata={"lr": 0.1}, local_data=[step])
            assert pending is not None
            stats = pending.result()
            assert stats.step == step
            assert stats.nbytes == 4 * 4096 + 3 * 4
            assert 0 <= stats.captured_seconds <= stats.written_seconds <= stats.committed_seconds
    again = Checkpointer(tmp_path / "run")
    assert again.steps() == [5, 10, 20]
    assert again.latest_step() == 20
    assert again.restore(like=tree(0))["step"] == 20
    assert again.restored is not None
    assert again.restored.metadata == {"lr": 0.1, "step": 20, "metrics": {"loss": 0.05}}
    assert again.restored.local_data == [[20]]
    assert int(again.restore(5)["w"][0, 0]) == 5
    assert again.info(10).metadata["step"] == 10


def test_what_is_not_a_step_is_not_listed_and_not_touched(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "best", tree(1))
    (tmp_path / "7").mkdir()  # what a killed save leaves
    (tmp_path / "007").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with Checkpointer(tmp_path, keep_last=1) as ckpt:
        for step in range(3):
            ckpt.save(step, tree(step))
    assert Checkpointer(tmp_path).steps() == [2]
    assert sorted(os.listdir(tmp_path)) == ["007", "2", "7", "best", "notes.txt"]


def test_no_step_at_all_is_said_so(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path / "run")
    with pytest.raises(CheckpointNotFoundError, match="no step was saved"):
        ckpt.restore()
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint: there is no manifest.json"):
        ckpt.restore(3)


def test_a_step_is_not_saved_twice_by_accident(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree(1))
        with pytest.raises(CheckpointExistsError, match="a checkpoint is there already"):
            ckpt.save(1, tree(2))
        ckpt.save(1, tree(3), overwrite=True)
    assert Checkpointer(tmp_path).restore()["step"] == 3


def test_an_await_and_an_async_twin(tmp_path: Path) -> None:
    async def main() -> int:
        async with jaxckpt.AsyncCheckpointer(tmp_path, keep_last=2) as ckpt:
            for step in range(4):
                pending = await ckpt.save(step, tree(step))
                assert pending is not None
                assert (await pending).step == step
            await ckpt.wait()
            assert await ckpt.steps() == [2, 3]
            assert await ckpt.latest_step() == 3
            return (await ckpt.restore())["step"]

    assert asyncio.run(main()) == 3


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, True])
def test_a_step_is_a_whole_number(tmp_path: Path, step: object) -> None:
    with pytest.raises(ValueError, match="expected a whole number of at least 0"):
        Checkpointer(tmp_path).save(step, tree(1))  # pyright: ignore
    assert Checkpointer(tmp_path).save(np.int64(3), tree(1)) is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "keep_last is 0; expected a whole number of at least 1"),
        ({"keep_every": -3}, "keep_every is -3"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"full_every": 0}, "full_every is 0"),
        ({"every_steps": 0}, "every_steps is 0"),
        ({"every_seconds": 0}, "every_seconds is 0"),
        ({"max_overhead": 1.0}, "max_overhead is 1.0; expected a share between 0 and 1"),
    ],
)
def test_an_option_out_of_range_is_refused(tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, **arguments)


def test_metadata_that_json_does_not_keep_is_refused(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    with pytest.raises(TypeError, match=r"metadata\['a'\]\[1\] is of type ndarray; expected what JSON has"):
        ckpt.save(1, tree(1), metadata={"a": [1, np.ones(2)]})
    with pytest.raises(TypeError, match=r"local_data has the key 3; expected str keys"):
        ckpt.save(1, tree(1), local_data={3: 4})
    kept = {"nan": math.nan, "inf": -math.inf, "bytes": b"\0\xff", "nested": {"list": [1, None, True, "x", 1e-300]}}
    ckpt.save(1, tree(1), metadata=kept)
    ckpt.close()
    found = Checkpointer(tmp_path).info(1).metadata
    assert math.isnan(found.pop("nan"))
    assert {key: found[key] for key in ("inf", "bytes", "nested")} == {
        key: kept[key] for key in ("inf", "bytes", "nested")
    }


# --- failures


def test_a_failed_save_raises_once_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageError(28, "No space left on device", "the disk")

    ckpt = Checkpointer(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(_local.LocalLocation, "put", full)
        pending = ckpt.save(1, tree(1))
        assert pending is not None
        while not pending.done():
            time.sleep(0.01)
    with pytest.raises(StorageError, match="No space left on device"):
        ckpt.save(2, tree(2))
    ckpt.save(2, tree(2))
    ckpt.close()
    assert Checkpointer(tmp_path).steps() == [2]


def test_a_failed_save_raises_at_the_end_of_the_block_unless_that_has_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageError(28, "No space left on device", "the disk")

    monkeypatch.setattr(_local.LocalLocation, "put", full)
    with pytest.raises(StorageError, match="No space left"), Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree(1))
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as ckpt:  # noqa: PT012
        ckpt.save(1, tree(1))
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="is closed; make a new one"):
        ckpt.save(2, tree(2))


def test_restore_takes_the_newest_sound_step_and_says_what_it_skipped(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=SMALL, full_every=1) as ckpt:
        for step in range(4):
            ckpt.save(step, tree(step))
    flip(tmp_path / "3", "arrays/w/c.0.0")
    flip(tmp_path / "2", "index-0.json")
    ckpt = Checkpointer(tmp_path, options=SMALL)
    with pytest.warns(UserWarning, match="skipped a damaged") as warned:
        assert ckpt.restore(like=tree(0))["step"] == 1
    assert ["step 3: leaf w:" in str(w.message) for w in warned] == [True, False]
    assert "step 2:" in str(warned[1].message)
    with pytest.raises(CorruptCheckpointError, match="leaf w"):
        ckpt.restore(3)
    ckpt.save(2, tree(2))  # what was skipped is no obstacle when training comes by again
    ckpt.save(3, tree(3))
    ckpt.close()
    assert Checkpointer(tmp_path).restore()["step"] == 3
    for step in range(4):
        (tmp_path / str(step) / "manifest.json").write_bytes(b"{}")
    with (
        pytest.warns(match="skipped"),
        pytest.raises(CorruptCheckpointError, match="no step is sound; step 3: "),
    ):
        Checkpointer(tmp_path).restore()


# --- in flight


def test_more_saves_than_allowed_wait_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = _local.LocalLocation.put

    def slow(self: _local.LocalLocation, *args: object, **kwargs: object) -> None:
        time.sleep(0.3)
        original(self, *args, **kwargs)  # pyright: ignore

    monkeypatch.setattr(_local.LocalLocation, "put", slow)
    with Checkpointer(tmp_path, max_in_flight=2) as ckpt:
        waits = [pending.waited_seconds for step in range(3) if (pending := ckpt.save(step, tree(step)))]
    assert waits[0] < 0.1
    assert waits[1] < 0.1
    assert waits[2] > 0.1


def test_deleting_never_delays_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    deleted: list[str] = []

    def hangs(path: str, **_: object) -> None:
        free.wait(30)
        deleted.append(path)

    monkeypatch.setattr(jaxckpt._api, "delete", hangs)
    with Checkpointer(tmp_path, keep_last=1) as ckpt:
        for step in range(4):
            pending = ckpt.save(step, tree(step))
            assert pending is not None
            pending.result(timeout=10)
        assert not deleted
        free.set()
        ckpt.wait()
        assert deleted


# --- links


def shared_files(one: Path, other: Path) -> int:
    inodes = {file.stat().st_ino for file in one.rglob("c*") if file.is_file()}
    return sum(file.stat().st_ino in inodes for file in other.rglob("c*") if file.is_file())


def test_only_what_changed_is_written_and_deleting_the_base_breaks_nothing(tmp_path: Path) -> None:
    frozen = {f"frozen-{n}": jnp.arange(300_000) + n for n in range(8)}
    small = {f"small-{n}": jnp.full(1000, n) for n in range(100)}
    options = SaveOptions(pack_below_bytes=100_000)
    with Checkpointer(tmp_path, options=options, full_every=10) as ckpt:
        written = []
        for step in range(4):
            state = {**frozen, **small, "lora": jnp.full(50_000, step), "small-3": jnp.full(1000, step)}
            pending = ckpt.save(step, state)
            assert pending is not None
            written.append(pending.result().written_nbytes)
    assert max(written[1:]) < 0.03 * written[0]
    assert shared_files(tmp_path / "0", tmp_path / "3") == 9
    for step in range(3):
        jaxckpt.delete(tmp_path / str(step))
    assert jaxckpt.verify(tmp_path / "3").ok
    found = jaxckpt.restore(tmp_path / "3")
    for name, array in {**frozen, **small, "lora": jnp.full(50_000, 3), "small-3": jnp.full(1000, 3)}.items():
        np.testing.assert_array_equal(found[name], array)


def test_every_so_many_saves_all_is_written(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=SMALL, full_every=3) as ckpt:
        written = [pending.result().written_nbytes for step in range(7) if (pending := ckpt.save(step, tree(1)))]
    assert [nbytes > 0 for nbytes in written] == [True, False, False, True, False, False, True]


def test_a_leaf_that_moved_or_has_another_dtype_of_the_same_bytes_is_right(tmp_path: Path) -> None:
    zeros = {"a": jnp.zeros(2000, jnp.int32), "b": jnp.ones(2000, jnp.int32), "c": jnp.arange(2000)}
    jaxckpt.save(tmp_path / "0", zeros, options=SMALL)
    changed = {
        "a": jnp.zeros(2000, jnp.float32),
        "d": jnp.ones(2000, jnp.int32),
        "c": jnp.arange(2000).reshape(2, 1000),
    }
    for name, options in (("1", SMALL), ("2", None)):
        jaxckpt.save(tmp_path / name, changed, base=tmp_path / "0", options=options)
        found = jaxckpt.restore(tmp_path / name, changed)
        for key, array in changed.items():
            np.testing.assert_array_equal(found[key], array)
        assert jaxckpt.verify(tmp_path / name).ok


def test_a_base_that_is_missing_or_damaged_is_no_obstacle(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "0", tree(1), options=SMALL)
    flip(tmp_path / "0", "index-0.json")
    for name, base in (("1", "0"), ("2", "none")):
        info = jaxckpt.save(tmp_path / name, tree(1), base=tmp_path / base, options=SMALL)
        assert info.indexes[0].written_nbytes > 0
        assert jaxckpt.verify(tmp_path / name).ok


def test_verify_names_all_steps_that_share_a_bad_file(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=SMALL) as ckpt:
        for step in range(3):
            ckpt.save(step, {**tree(1), "step": step})
    flip(tmp_path / "1", "arrays/w/c.2.0")
    (fault,) = jaxckpt.verify(tmp_path / "2").faults
    assert fault.leaf == "w"
    assert f"shared with {tmp_path / '0'}, {tmp_path / '1'}" in fault.problem


# --- retention, purely


def model_kept(
    steps: list[int], last: int | None, every: int | None, best: int | None, losses: dict[int, float]
) -> set[int]:
    """The rules once more, in the plainest words."""
    if last is None and every is None and best is None:
        return set(steps)
    keep = {max(steps)} if steps else set()
    for step in steps:
        newer = [other for other in steps if other > step]
        better = [o for o in steps if o in losses and step in losses and (losses[o], -o) < (losses[step], -step)]
        keep |= {step} if last is not None and len(newer) < last else set()
        keep |= {step} if every is not None and step % every == 0 else set()
        keep |= {step} if best is not None and step in losses and len(better) < best else set()
    return keep


few = st.one_of(st.none(), st.integers(1, 4))


@given(st.sets(st.integers(0, 40)), few, few, few, st.dictionaries(st.integers(0, 40), st.floats(0, 5)))
def test_retention_keeps_what_any_rule_keeps_and_the_newest(
    steps: set[int], last: int | None, every: int | None, best: int | None, losses: dict[int, float]
) -> None:
    keep_best = None if best is None else KeepBest("loss", count=best)
    retention = Retention(last, every, keep_best)
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    assert retention.kept(steps, metrics) == model_kept(sorted(steps), last, every, best, losses)


def test_a_nan_is_never_the_best_and_the_largest_can_be(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=1, keep_best=KeepBest("accuracy", mode="max")) as ckpt:
        for step, accuracy in enumerate([0.2, math.nan, 0.9, 0.3, 0.1]):
            ckpt.save(step, tree(step), metrics={"accuracy": accuracy})
        ckpt.wait()
        assert ckpt.best_step() == 2
    assert Checkpointer(tmp_path).steps() == [2, 4]
    with pytest.raises(ValueError, match="keep_best was not given"):
        Checkpointer(tmp_path).best_step()


# --- cadence


@pytest.mark.parametrize(
    ("cadence", "step", "since", "cost", "due"),
    [
        (Cadence(), 3, 0.0, 0.0, True),
        (Cadence(every_steps=5), 10, 0.0, 0.0, True),
        (Cadence(every_steps=5), 11, 1e9, 0.0, False),
        (Cadence(every_seconds=60), 1, 59.9, 0.0, False),
        (Cadence(every_seconds=60), 1, 60.0, 0.0, True),
        (Cadence(max_overhead=0.03), 1, 9.9, 0.3, False),
        (Cadence(max_overhead=0.03), 1, 10.1, 0.3, True),
        (Cadence(every_steps=5, every_seconds=60), 1, 61.0, 0.0, True),
    ],
)
def test_when_a_step_is_due(cadence: Cadence, step: int, since: float, cost: float, due: bool) -> None:
    assert cadence.is_due(step, since, cost) is due


def test_what_a_save_costs_is_the_time_beyond_a_quiet_step() -> None:
    cost = Cost()
    for now in (0.0, 1.0, 2.0, 3.0):
        cost.visit(now, in_flight=False)
    cost.saved(0.25, 3.25)
    cost.visit(4.75, in_flight=True)  # half a second slower than a quiet step
    cost.visit(5.75, in_flight=True)
    cost.visit(6.75, in_flight=False)
    assert cost.seconds == pytest.approx(0.75)
    assert young_daly_seconds(0.75, 3600) == pytest.approx(math.sqrt(2 * 0.75 * 3600))


def test_a_step_that_is_not_due_is_not_saved_unless_forced(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every_steps=10) as ckpt:
        saved = [step for step in range(25) if ckpt.save(step, tree(step), force=step == 7) is not None]
        assert ckpt.interval_seconds(3600) >= 0
    assert saved == [0, 7, 10, 20]
    assert Checkpointer(tmp_path).steps() == saved


# --- signals


def test_a_signal_makes_the_next_save_due_and_goes_on_to_the_earlier_handler(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with Checkpointer(tmp_path, every_steps=1000, save_on_signal=[signal.SIGTERM]) as ckpt:
            assert ckpt.save(1, tree(1)) is None
            assert not ckpt.reached_preemption(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert ckpt.reached_preemption(2)
            assert ckpt.save(2, tree(2)) is not None
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert Checkpointer(tmp_path).steps() == [2]


def test_a_script_that_gets_sigterm_saves_and_leaves(
    tmp_path: Path, run_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_script(
        """
        import os, signal, jax.numpy as jnp, jaxckpt
        with jaxckpt.Checkpointer("run", every_steps=1000, save_on_signal=[signal.SIGTERM]) as ckpt:
            for step in range(1, 100):
                if step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                ckpt.save(step, {"w": jnp.full(3, step)})
                if ckpt.reached_preemption(step):
                    break
        print("left after", step)
        """
    )
    assert done.stdout == "left after 5\n", done.stderr
    assert Checkpointer(tmp_path / "run").steps() == [5]


# --- telling


def test_each_commit_is_told_to_the_callback_and_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[jaxckpt.StepStats] = []
    with caplog.at_level(logging.INFO, "jaxckpt"), Checkpointer(tmp_path, on_saved=told.append) as ckpt:
        for step in range(3):
            ckpt.save(step, tree(step))
    assert sorted(stats.step for stats in told) == [0, 1, 2]
    assert all(stats.bytes_per_second > 0 for stats in told)
    assert "saved step 2: 16396 bytes (" in caplog.text


@pytest.mark.parametrize("transfer", ["pinned", "staged", "direct"])
def test_a_trace_shows_what_happened_to_each_shard(tmp_path: Path, transfer: Transfer) -> None:
    options = SaveOptions(pack_below_bytes=10_000, transfer=transfer, trace_directory=tmp_path / "traces")
    info = jaxckpt.save(tmp_path / "a", {"large": jnp.zeros(10_000), "small": jnp.zeros(10)}, options=options)
    events = json.loads((tmp_path / "traces" / f"{info.attempt}-0.json").read_text())["traceEvents"]
    for number in {event["id"] for event in events}:
        begin, end = (event for event in events if event["id"] == number)
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert begin["ts"] <= end["ts"]
    names = [event["name"] for event in events if event["ph"] == "b"]
    shard = ["hash", "write", "write", "copy and hash", "copy and hash"]
    around = ["begin", "write records and sync directories", "commit"]
    assert sorted(names) == sorted([*shard, *around, *(["transfer"] if transfer != "direct" else [])])
