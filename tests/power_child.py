"""What the processes do that lose their disk: save, overwrite, delete, and report each step through a pipe."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import SaveOptions, StorageError, _tensorstore
from jaxckpt._local import LocalLocation

OPTIONS = SaveOptions(pack_below_bytes=64 << 10)  # so that arrays of a few MiB are not packed


class Step(NamedTuple):
    """Something done at a path: the tree or array `number` saved, or, where that is None, a deletion."""

    kind: str
    path: str
    number: int | None


def array_of(number: int, row_bytes: int = 1 << 19) -> jax.Array:
    """An array over all devices; no two numbers give the same, and most not even the same shape."""
    devices = jax.devices()
    shape = (len(devices), row_bytes + 4096 * (number % 8))
    data = np.random.default_rng(number).integers(0, 256, shape, np.uint8)
    return jax.device_put(data, NamedSharding(Mesh(np.array(devices), "d"), PartitionSpec("d")))


def tree_of(number: int, row_bytes: int = 1 << 19) -> dict[str, Any]:
    """A small tree with an array that has files of its own, small ones that are packed, and values."""
    return {
        "large": array_of(number, row_bytes),
        "small": {"a": jnp.full(100 + number % 10, number, jnp.float32), "b": np.arange(number, number + 7)},
        "half": jnp.asarray([number % 256, 1, 2], jnp.bfloat16),
        "number": number,
        "name": f"number {number}",
    }


def same(found: Any, expected: Any) -> bool:
    """Whether two trees are equal, bit for bit."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return False
    return all(map(_same_leaf, jax.tree.leaves(found), jax.tree.leaves(expected)))


def _same_leaf(found: Any, expected: Any) -> bool:
    if not isinstance(expected, jax.Array | np.ndarray):
        return type(found) is type(expected) and found == expected
    a, b = np.asarray(found), np.asarray(expected)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def steps(first: int) -> Iterator[Step]:
    """New checkpoints, overwrites of one, plain arrays and deletions in turn, for ever."""
    for number in itertools.count(first, 2):
        yield Step("save", "latest", number)
        yield Step("save", f"steps/{number}", number)
        yield Step("save", "latest", number + 1)
        yield Step("serialize", f"arrays/{number}", number)
        if number > first:
            yield Step("delete", f"steps/{number - 2}", None)


def take(step: Step, root: Path) -> None:
    """Do `step`; what it does is durable when this returns."""
    path = root / step.path
    if step.number is None:
        jaxckpt.delete(path)
    elif step.kind == "serialize":
        asyncio.run(jaxckpt.async_serialize([array_of(step.number)], [path], overwrite=True, options=OPTIONS))
    else:
        jaxckpt.save(path, tree_of(step.number), overwrite=True, options=OPTIONS)


def keep_saving(report: Connection, root: Path, first: int, count: int | None, mutant: str) -> None:
    """Take `count` steps (None: as many as there is time for), telling when each begins and ends; then wait."""
    _mutate(mutant)
    for step in itertools.islice(steps(first), count):
        report.send(("begun", step))
        try:
            take(step, root)
        except StorageError:
            return
        report.send(("done", step))
    report.recv()


def save_on_a_frozen_disk(path: Path, timeout_seconds: float) -> None:
    """A script that does not catch the error of its save."""
    options = SaveOptions(pack_below_bytes=64 << 10, timeout_seconds=timeout_seconds)
    jaxckpt.save(path, tree_of(1), overwrite=True, options=options)


MUTANTS = ("nothing is synced", "directories are not synced", "data are not synced")
LATE = "data are synced after the commit"


def _mutate(mutant: str) -> None:
    """Break the durability of this process's saves. The process ends with them."""
    match mutant:
        case "":
            return
        case "nothing is synced":
            mock.patch.object(os, "fsync").start()
            mock.patch.dict(_tensorstore._LOCAL, file_io_sync=False).start()
        case "directories are not synced":
            mock.patch.object(LocalLocation, "sync").start()
        case "data are not synced":
            mock.patch.dict(_tensorstore._LOCAL, file_io_sync=False).start()
        case "data are synced after the commit":
            mock.patch.dict(_tensorstore._LOCAL, file_io_sync=False).start()
            mock.patch.object(LocalLocation, "put", _put_before_data).start()
        case _:
            raise ValueError(mutant)


_put = LocalLocation.put


def _put_before_data(location: LocalLocation, name: str, data: bytes, *, replaces: bytes | None) -> None:
    _put(location, name, data, replaces=replaces)
    time.sleep(0.3)
    for file in location.files():
        fd = os.open(os.path.join(location.path, file), os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


NOBODY = 65534


def run_as_nobody(report: Connection, function: Callable[..., Any], *args: Any) -> None:
    """Give up root, create files for nobody else, and report what `function` returns."""
    os.umask(0o077)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    report.send(function(*args))


def saved(path: Path, number: int) -> bool:
    """Save twice, the second time in place of the first, and look at the result."""
    for value in (number + 1, number):
        jaxckpt.save(path, tree_of(value), overwrite=True, options=OPTIONS)
    return is_readable(path, number)


def refused(path: Path) -> tuple[int | None, str]:
    """What an overwrite says."""
    return _failure(lambda: jaxckpt.save(path, tree_of(1), overwrite=True, options=OPTIONS))


def unreadable(path: Path) -> tuple[int | None, str]:
    """What a restore says."""
    return _failure(lambda: jaxckpt.restore(path))


def is_readable(path: Path, number: int) -> bool:
    """Whether the checkpoint at `path` is the tree `number`."""
    return same(jaxckpt.restore(path), tree_of(number)) and jaxckpt.verify(path).ok


def _failure(call: Callable[[], Any]) -> tuple[int | None, str]:
    try:
        call()
    except StorageError as error:
        return error.errno, str(error)
    return None, "no error"
