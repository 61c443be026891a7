"""Processes of test_writers: they write, delete and read one path at once."""

import contextlib
import os
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import syscalls_child

import jaxckpt
from jaxckpt import CheckpointError, CheckpointNotFoundError
from jaxckpt._local import LocalLocation


def generation_at(path: str) -> int | None:
    """The generation of the checkpoint at `path`, None where there is none; all of it is of that one."""
    try:
        found = jaxckpt.restore(path)
    except CheckpointNotFoundError:
        return None
    expected = syscalls_child.values(found["step"])
    np.testing.assert_array_equal(found["large"], expected["large"])
    np.testing.assert_array_equal(found["small"]["a"], expected["small"]["a"])
    np.testing.assert_array_equal(found["small"]["b"], expected["small"]["b"])
    return found["step"]


def assert_clean(path: str) -> None:
    """A collection without grace leaves the manifest and its data, which are right, or nothing at all."""
    if not os.path.exists(path):
        return
    assert jaxckpt.gc(path, grace_seconds=0).kept == ()
    left = sorted(os.listdir(path)) if os.path.exists(path) else []
    if left:
        report = jaxckpt.verify(path)
        assert report.ok, report.faults
        assert left == [f"d-{report.attempt}", "manifest.json"]


def _no_lock_and_no_look() -> None:
    @contextlib.contextmanager
    def locked(self: LocalLocation) -> Generator[None]:
        yield

    def put(self: LocalLocation, name: str, data: bytes, *, replaces: bytes | None) -> None:
        self.write(f".{name}.{os.getpid()}", data)
        os.rename(self.child(f".{name}.{os.getpid()}").path, self.child(name).path)

    LocalLocation.locked, LocalLocation.put = locked, put


def _gated(put: Callable[..., None], gate: Any) -> Callable[..., None]:
    def gated(self: LocalLocation, *args: Any, **kwargs: Any) -> None:
        gate.wait(60)
        put(self, *args, **kwargs)

    return gated


def write(channel: Connection, gate: Any, mutant: bool) -> None:
    """Save what `channel` asks for. All writers reach `gate` before the first of them commits."""
    if mutant:
        _no_lock_and_no_look()
    LocalLocation.put = _gated(LocalLocation.put, gate)
    while job := channel.recv():
        path, generation, overwrite = job
        try:
            syscalls_child.save(path, generation, overwrite)
            channel.send(None)
        except Exception as error:  # noqa: BLE001, the test judges it
            channel.send(f"{type(error).__name__}: {error}")


def overwrite_always(channel: Connection, stop: Any, path: str) -> None:
    generation = 0

    def act() -> str:
        nonlocal generation
        generation += 1
        syscalls_child.save(path, generation, True)
        return "saved"

    _act_always(channel, stop, act)


def delete_always(channel: Connection, stop: Any, path: str) -> None:
    _act_always(channel, stop, lambda: jaxckpt.delete(path) or "deleted", pause=0.1)


def read_always(channel: Connection, stop: Any, path: str) -> None:
    newest = 0

    def act() -> str:
        nonlocal newest
        found = generation_at(path)
        if found is None:
            return "nothing"
        assert found >= newest, f"generation {found} after {newest}"
        newest = found
        return "read"

    _act_always(channel, stop, act)


def verify_always(channel: Connection, stop: Any, path: str) -> None:
    def act() -> str:
        report = jaxckpt.verify(path)
        assert report.ok, report.faults
        return "verified"

    _act_always(channel, stop, act)


def collect_always(channel: Connection, stop: Any, path: str) -> None:
    _act_always(channel, stop, lambda: "removed" if jaxckpt.gc(path, grace_seconds=0).removed else "clean", pause=0.01)


def _act_always(channel: Connection, stop: Any, act: Callable[[], str], pause: float = 0) -> None:
    """Do it again and again; tell how often it ended how, and of anything that may not happen."""
    counts: dict[str, int] = {}
    while not stop.wait(pause):
        try:
            outcome = act()
        except CheckpointNotFoundError:
            outcome = "not found"
        except CheckpointError as error:
            outcome = f"{type(error).__name__}: {error}".replace(str(getattr(error, "filename", "")), "PATH")
        except Exception as error:  # noqa: BLE001, the test judges it
            outcome = f"untyped {type(error).__name__}: {error}"
        counts[outcome] = counts.get(outcome, 0) + 1
    channel.send(counts)
