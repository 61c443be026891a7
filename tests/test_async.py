"""Saves in the background: what is captured, how failures surface, what a cancelled or forgotten save leaves."""

import asyncio
import gc
import resource
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import SaveOptions

TRANSFERS = ["auto", "pinned", "direct", "staged"]
RunScript = Callable[..., CompletedProcess[str]]


@contextmanager
def full_disk() -> Generator[None]:
    """No file may grow beyond 1 MiB: a write fails for real, without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing_save(path: Path) -> jaxckpt.PendingSave:
    with full_disk():
        pending = jaxckpt.start_save(path, {"w": jnp.ones((4 << 20,))})
        while not pending.done():
            threading.Event().wait(0.01)
    return pending


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_arrays_may_be_donated_or_deleted_as_soon_as_start_save_returns(tmp_path: Path, transfer: str) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
    donated = jax.device_put(jnp.arange(1 << 22, dtype=jnp.float32), sharding)
    deleted = jax.device_put(jnp.arange(1 << 22, dtype=jnp.int32), sharding)
    small = jnp.arange(100)
    expected = [np.array(x) for x in (donated, deleted, small)]
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with jaxckpt.start_save(tmp_path / "a", [donated, deleted, small], options=SaveOptions(transfer=transfer)):
        jax.block_until_ready([step(donated), step(small)])
        deleted.delete()
        for _ in range(4):  # what would be written into freed memory
            jax.block_until_ready(jnp.full((1 << 22,), 7.0))
    for found, value in zip(jaxckpt.restore(tmp_path / "a"), expected, strict=True):
        np.testing.assert_array_equal(found, value)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [10, 4 << 20])
def test_numpy_arrays_may_be_overwritten_as_soon_as_start_save_returns(tmp_path: Path, size: int) -> None:
    array = np.arange(size)
    with jaxckpt.start_save(tmp_path / "a", {"n": array}):
        array[:] = -1
    np.testing.assert_array_equal(jaxckpt.restore(tmp_path / "a")["n"], np.arange(size))


def test_numpy_arrays_larger_than_the_budget_are_captured_all_the_same(tmp_path: Path) -> None:
    array = np.arange(8 << 20)
    options = SaveOptions(max_host_bytes=4 << 20, pack_below_bytes=1 << 20)
    with jaxckpt.start_save(tmp_path / "a", {"n": array}, options=options):
        array[:] = -1
    np.testing.assert_array_equal(jaxckpt.restore(tmp_path / "a")["n"], np.arange(8 << 20))


def test_a_script_that_ends_without_waiting_has_saved(tmp_path: Path, run_script: RunScript) -> None:
    done = run_script("""
        import jax.numpy as jnp, numpy as np, jaxckpt
        tree = {"large": jnp.arange(32 << 20), "numpy": np.arange(100), "small": jnp.arange(5)}
        jaxckpt.start_save("forgotten", tree)
    """)
    assert (done.returncode, done.stderr) == (0, "")
    found = jaxckpt.restore(tmp_path / "forgotten")
    np.testing.assert_array_equal(found["large"], np.arange(32 << 20))
    np.testing.assert_array_equal(found["numpy"], np.arange(100))


def test_a_script_that_ends_without_waiting_for_a_save_that_fails_exits_with_the_reason(run_script: RunScript) -> None:
    done = run_script("""
        import resource, jax.numpy as jnp, jaxckpt
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        jaxckpt.start_save("full", {"w": jnp.ones((8 << 20,))})
        print("the script itself went well")
    """)
    assert done.returncode == 1
    assert done.stdout == "the script itself went well\n"
    assert "jaxckpt: a background save failed: StorageError: [Errno 27] File too large" in done.stderr


def test_a_script_that_raises_with_a_save_in_flight_has_saved(tmp_path: Path, run_script: RunScript) -> None:
    done = run_script("""
        import jax.numpy as jnp, jaxckpt
        jaxckpt.start_save("saved", {"w": jnp.arange(8 << 20)})
        raise RuntimeError("the training failed")
    """)
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: the training failed\n")
    np.testing.assert_array_equal(jaxckpt.restore(tmp_path / "saved")["w"], np.arange(8 << 20))


def test_a_failed_save_raises_at_result_and_not_again(tmp_path: Path) -> None:
    pending = failing_save(tmp_path / "a")
    with pytest.raises(jaxckpt.StorageError, match="File too large") as caught:
        pending.result()
    assert str(tmp_path / "a") in caught.value.filename
    jaxckpt.save(tmp_path / "b", {"w": jnp.ones(3)})


def test_a_failed_save_raises_when_awaited(tmp_path: Path) -> None:
    pending = failing_save(tmp_path / "a")

    async def main() -> None:
        await pending

    with pytest.raises(jaxckpt.StorageError, match="File too large"):
        asyncio.run(main())
    jaxckpt.save(tmp_path / "b", {"w": jnp.ones(3)})


def test_a_failed_save_raises_at_the_end_of_its_block(tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.StorageError, match="File too large"), failing_save(tmp_path / "a"):
        pass
    jaxckpt.save(tmp_path / "b", {"w": jnp.ones(3)})


def test_a_failed_save_that_nobody_asked_about_raises_at_the_next_save_once(tmp_path: Path) -> None:
    failing_save(tmp_path / "a")
    with pytest.raises(jaxckpt.StorageError, match="File too large"):
        jaxckpt.save(tmp_path / "b", {"w": jnp.ones(3)})
    assert not (tmp_path / "b").exists()
    jaxckpt.save(tmp_path / "b", {"w": jnp.ones(3)})


def test_a_failed_overwrite_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"w": jnp.arange(10)})
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    with full_disk(), pytest.raises(jaxckpt.StorageError, match="File too large"):
        jaxckpt.save(tmp_path / "a", {"w": jnp.ones((4 << 20,))}, overwrite=True)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before
    np.testing.assert_array_equal(jaxckpt.restore(tmp_path / "a")["w"], np.arange(10))


def test_a_failed_first_save_leaves_no_directory(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(jaxckpt.StorageError, match="File too large"):
        jaxckpt.save(tmp_path / "new" / "a", {"w": jnp.ones((4 << 20,))})
    assert list(tmp_path.iterdir()) == []


def test_result_waits_only_as_long_as_it_is_told(tmp_path: Path) -> None:
    pending = jaxckpt.start_save(tmp_path / "a", {"w": jnp.arange(16 << 20)})
    with pytest.raises(TimeoutError):
        pending.result(timeout=0)
    assert pending.result().nbytes == 64 << 20
    assert pending.done()


def test_blocking_calls_work_inside_a_running_loop(tmp_path: Path) -> None:
    async def main() -> None:
        jaxckpt.save(tmp_path / "a", {"w": jnp.arange(5)})
        np.testing.assert_array_equal(jaxckpt.restore(tmp_path / "a")["w"], np.arange(5))

    asyncio.run(main())


def test_two_saves_run_at_once_from_threads_and_from_a_loop(tmp_path: Path) -> None:
    trees = {name: {"w": jnp.full((1 << 20,), value)} for value, name in enumerate("abcd")}
    threads = [threading.Thread(target=jaxckpt.save, args=(tmp_path / name, trees[name])) for name in "ab"]

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in "cd":
                tasks.create_task(jaxckpt.save_async(tmp_path / name, trees[name]))

    for thread in threads:
        thread.start()
    asyncio.run(main())
    for thread in threads:
        thread.join()
    for name, tree in trees.items():
        np.testing.assert_array_equal(jaxckpt.restore(tmp_path / name)["w"], tree["w"])


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_cancelled_save_leaves_no_checkpoint_no_task_and_no_thread(tmp_path: Path, transfer: str) -> None:
    options = SaveOptions(transfer=transfer, max_host_bytes=16 << 20)

    async def main() -> None:
        saving = asyncio.create_task(jaxckpt.save_async(tmp_path / "a", {"w": jnp.ones((32 << 20,))}, options=options))
        while not list(tmp_path.glob("a/d-*")):
            await asyncio.sleep(0.001)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxckpt"]
    jaxckpt.save(tmp_path / "a", {"w": jnp.ones(3)})


def test_a_cancelled_async_serialize_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        writing = asyncio.create_task(jaxckpt.async_serialize([jnp.ones((32 << 20,))], [tmp_path / "a"]))
        while not list(tmp_path.glob("a/*")):
            await asyncio.sleep(0.001)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    options = SaveOptions(timeout_seconds=0.001)
    with pytest.raises(jaxckpt.SaveTimeoutError, match=r"did not end within 0\.001 seconds; raise timeout_seconds"):
        jaxckpt.save(tmp_path / "a", {"w": jnp.ones((32 << 20,))}, options=options)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_up_to_the_whole(tmp_path: Path) -> None:
    tree = {"large": jnp.ones((4 << 20,)), "small": jnp.ones(10), "empty": jnp.ones((0,)), "numpy": np.ones(7)}
    seen: list[tuple[int, int]] = []
    info = jaxckpt.save(tmp_path / "a", tree, on_progress=lambda *bytes_: seen.append(bytes_))
    assert seen == sorted(seen)
    assert seen[-1] == (info.nbytes, info.nbytes)
    seen.clear()
    jaxckpt.restore(tmp_path / "a", on_progress=lambda *bytes_: seen.append(bytes_))
    assert seen == sorted(seen)
    assert seen[-1] == (info.nbytes, info.nbytes)


def test_the_loop_of_the_caller_turns_while_a_save_runs(tmp_path: Path) -> None:
    async def main() -> int:
        turns = 0
        saving = asyncio.create_task(jaxckpt.save_async(tmp_path / "a", {"w": jnp.ones((32 << 20,))}))
        while not saving.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(main()) > 100


def test_a_reader_that_is_overtaken_by_overwrites_sees_one_whole_tree(tmp_path: Path) -> None:
    trees = [{"a": jnp.full((200_000,), i), "b": jnp.full((300_000,), i)} for i in range(6)]
    jaxckpt.save(tmp_path / "c", trees[0])

    def overwrite() -> None:
        for tree in trees[1:] * 3:
            jaxckpt.save(tmp_path / "c", tree, overwrite=True)

    writer = threading.Thread(target=overwrite)
    writer.start()
    seen = set()
    while writer.is_alive():
        found = jaxckpt.restore(tmp_path / "c")
        values = {int(x) for leaf in found.values() for x in np.unique(leaf)}
        assert len(values) == 1
        seen |= values
    writer.join()
    assert len(seen) > 1


def test_the_garbage_collector_is_left_as_it_was(tmp_path: Path) -> None:
    tree = {"w": jnp.ones(10)}
    for enabled in (False, True):
        (gc.enable if enabled else gc.disable)()
        jaxckpt.save(tmp_path / "a", tree, overwrite=True)
        jaxckpt.restore(tmp_path / "a", tree)
        assert gc.isenabled() == enabled
