"""What runs in the children of test_syscalls and test_kills."""

import asyncio
import contextlib
import errno
import os
import pickle
import resource
import socket
import uuid
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import syscalls
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import SaveOptions, StorageError, _commit, _local, _tensorstore
from jaxckpt._local import LocalLocation

OPTIONS = SaveOptions(pack_below_bytes=1024)
"""Small files, so that many runs fit: the sharded leaf still gets a Zarr array of its own, and the others a pack."""


def values(generation: int) -> dict[str, Any]:
    """The tree of one generation. No two generations share a value of any leaf."""
    return {
        "large": np.arange(8 * 1024, dtype=np.int32).reshape(8, 1024) + generation * 10_000,
        "small": {"a": np.arange(10, dtype=np.int32) + generation * 10_000, "b": np.full(7, generation)},
        "step": generation,
    }


def tree(generation: int) -> dict[str, Any]:
    """The same with the large leaf in four shards on eight devices."""
    found = values(generation)
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")), PartitionSpec("x"))
    large, small = jax.device_put(found["large"], sharding), found["small"] | {"a": jnp.asarray(found["small"]["a"])}
    return found | {"large": large, "small": small}


def save(path: str, generation: int, overwrite: bool) -> None:
    jaxckpt.save(path, tree(generation), overwrite=overwrite, options=OPTIONS)


def restore(path: str) -> None:
    """The checkpoint at `path`, which is that of one generation, byte for byte."""
    found = jaxckpt.restore(path)
    expected = values(found["step"])
    assert np.array_equal(found["large"], expected["large"])
    assert all(np.array_equal(found["small"][name], expected["small"][name]) for name in ("a", "b"))


def delete(path: str) -> None:
    jaxckpt.delete(path)


def gc(path: str) -> None:
    jaxckpt.gc(path, grace_seconds=0)


def serialize(path: str, generation: int, overwrite: bool) -> None:
    found = tree(generation)
    arrays, paths = [found["large"], found["small"]["a"]], [f"{path}/large", f"{path}/a"]
    asyncio.run(jaxckpt.async_serialize(arrays, paths, overwrite=overwrite, options=OPTIONS))


FUNCTIONS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (save, restore, delete, gc, serialize)
}


def _manifest_in_place() -> None:
    def put(self: LocalLocation, name: str, data: bytes, *, replaces: bytes | None) -> None:
        fd = os.open(self.child(name).path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for half in data[:100], data[100:]:
            os.write(fd, half)
            os.fsync(fd)
        os.close(fd)

    LocalLocation.put = put


def _manifest_first() -> None:
    put = LocalLocation.put

    def early(self: LocalLocation, name: str, data: bytes, *, replaces: bytes | None) -> None:
        index = self.child(_commit.decode_manifest(data, "").data).child("index-0.json").path
        later = self.child(_commit.decode_manifest(data, "").data).child("index-9.json").path
        os.rename(index, later)
        put(self, name, data, replaces=replaces)
        os.rename(later, index)

    LocalLocation.put = early


def _one_directory() -> None:
    def write(self: LocalLocation, name: str, data: bytes) -> None:
        with open(self.child(name).path, "wb") as file:
            file.write(data)

    LocalLocation.write = write
    _commit.uuid = SimpleNamespace(uuid4=lambda: uuid.UUID(int=0))
    _commit._discard_data = lambda *_: None


def _unsynced_directories() -> None:
    sync = LocalLocation.sync

    def quiet(self: LocalLocation, directories: Iterable[str]) -> None:
        with contextlib.suppress(OSError):
            sync(self, directories)

    LocalLocation.sync = quiet


def _raw_errors() -> None:
    _local.StorageError = OSError


def _one_error_for_all() -> None:
    _tensorstore._as_ours = lambda error, where, attempts=0: StorageError(errno.EIO, "Input/output error", where)


def _doubt_taken_for_failure() -> None:
    _commit._may_be_current = _commit.is_current


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__.strip("_").replace("_", " "): mutant
    for mutant in (
        *(_manifest_in_place, _manifest_first, _one_directory),
        *(_unsynced_directories, _raw_errors, _one_error_for_all, _doubt_taken_for_failure),
    )
}
"""Faults of the library that the tests must find."""


def serve(channel: socket.socket, within: str, mutant: str = "") -> None:
    """Run what `channel` asks for, with every storage call handed over to the other end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    warm = f"{within}-warm/{os.getpid()}"
    save(warm, 0, False)
    serialize(f"{warm}-arrays", 0, False)
    restore(warm)
    delete(warm)
    if mutant:
        MUTANTS[mutant]()
    listener = syscalls.hand_over()
    socket.send_fds(channel, [b"ready"], [listener])
    channel.recv(16)
    os.close(listener)
    while command := channel.recv(1 << 16):
        function, args = pickle.loads(command)
        channel.send(pickle.dumps(_failure(FUNCTIONS[function], *args)))


def _failure(function: Callable[..., None], *args: Any) -> syscalls.Failure | None:
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001, the test judges it
        classes = tuple(kind.__name__ for kind in type(error).__mro__)
        return syscalls.Failure(
            classes, getattr(error, "errno", None), getattr(error, "filename", None), f"{type(error).__name__}: {error}"
        )
    return None
