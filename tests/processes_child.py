"""What the processes of the tests in `test_processes` do."""

import asyncio
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import SaveOptions, _commit, _processes, _store, _writer

SHARDED = np.arange(480 * 4096, dtype=np.float32).reshape(480, 4096)  # for 2, 4, 6 and 8 devices
SHAPES = {"sharded": PartitionSpec("x"), "last": PartitionSpec(None, "x"), "whole": PartitionSpec()}


def on_all(value: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """A global array over all devices of all processes."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def values() -> dict[str, np.ndarray]:
    small = {f"small-{number}": np.full((24, number + 1), number, np.float32) for number in range(20)}
    return {"sharded": SHARDED, "last": SHARDED[:48, :960] * 2, "whole": SHARDED[:321] * 3, **small}


def tree() -> dict[str, Any]:
    """Sharded, replicated, process-local and host leaves."""
    arrays = {name: on_all(value, SHAPES.get(name, PartitionSpec())) for name, value in values().items()}
    mixed = {"key": jax.random.key(7), "local": jnp.arange(5), "numpy": np.arange(3.0), "step": 11}
    return {"arrays": arrays, **mixed}


def wrong(found: dict[str, Any]) -> list[str]:
    """The leaves whose local shards are not what they should be."""
    expected = values()
    bad = [
        name
        for name, array in found["arrays"].items()
        if not all(np.array_equal(shard.data, expected[name][shard.index]) for shard in array.addressable_shards)
    ]
    rest = [
        np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(jax.random.key(7))),
        np.array_equal(found["local"], np.arange(5)),
        np.array_equal(found["numpy"], np.arange(3.0)),
        found["step"] == 11,
    ]
    return bad if all(rest) else [*bad, "mixed"]


def save(index: int, path: str, transfer: str = "auto") -> list[int]:
    info = jaxckpt.save(path, tree(), options=SaveOptions(transfer=transfer))  # pyright: ignore[reportArgumentType]
    return [file.written_nbytes for file in info.indexes]


def restore(index: int, path: str) -> list[str]:
    return wrong(jaxckpt.restore(path, tree()))


def serialize(index: int, directory: str) -> None:
    arrays = tree()["arrays"]
    asyncio.run(jaxckpt.async_serialize(arrays, {name: f"{directory}/{name}" for name in arrays}))


def deserialize(index: int, directory: str) -> list[str]:
    like = tree()
    paths = {name: f"{directory}/{name}" for name in like["arrays"]}
    return wrong({**like, "arrays": asyncio.run(jaxckpt.async_deserialize(paths, like["arrays"]))})


def save_replicated(index: int, path: str, shapes: list[tuple[int, ...]]) -> list[int]:
    arrays = [on_all(np.ones(shape, np.float32), PartitionSpec()) for shape in shapes]
    return [file.written_nbytes for file in jaxckpt.save(path, arrays).indexes]


def submesh(index: int, path: str) -> Any:
    """An array that lives on the devices of process 1 alone, beside one of each process's own."""
    mesh = Mesh(np.array([device for device in jax.devices() if device.process_index == 1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    value = np.arange(8, dtype=np.float32)
    parts = [jax.device_put(value[at], device) for device, at in sharding.addressable_devices_indices_map((8,)).items()]
    there = jax.make_array_from_single_device_arrays((8,), sharding, parts, dtype=value.dtype)
    info = jaxckpt.save(path, {"there": there, "mine": jnp.full(3, index)})
    found = jaxckpt.restore(path, {"there": there, "mine": jnp.zeros(3, int)})
    shards = [shard.data.tolist() for shard in found["there"].addressable_shards]
    return shards, found["mine"].tolist(), len(info.indexes)


def many_saves(index: int, directory: str, count: int) -> list[int]:
    """Resident bytes, open files and threads after the first few saves and after the last."""
    state = tree()
    figures = []
    for number in range(count):
        jaxckpt.save(f"{directory}/{number % 3}", state, overwrite=True)
        if number in (count // 2, count - 1):
            time.sleep(0.5)  # the worker threads of a save end a moment after it
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            figures += [resident, len(os.listdir("/proc/self/fd")), threading.active_count()]
    return figures


def two_in_flight(index: int, directory: str) -> list[str]:
    state = tree()
    first = jaxckpt.start_save(f"{directory}/a", state)
    second = jaxckpt.start_save(f"{directory}/b", {**state, "step": 12})
    second.result()
    first.result()
    later = jaxckpt.restore(f"{directory}/b", state)
    return wrong(jaxckpt.restore(f"{directory}/a", state)) + wrong({**later, "step": later["step"] - 1})


def save_beside_a_restore(index: int, directory: str) -> list[str]:
    """Process 1 still restores the checkpoint that the others replace."""
    state = tree()
    jaxckpt.save(f"{directory}/a", state)
    pending = jaxckpt.start_save(f"{directory}/a", state, overwrite=True)
    bad = wrong(jaxckpt.restore(f"{directory}/a", state)) if index == 1 else []
    pending.result()
    return bad


def unequal(index: int, directory: str, kind: str) -> str:
    """Save what the other process does not save; what is raised."""
    state: dict[str, Any] = {"w": on_all(SHARDED, PartitionSpec("x")), "step": 1}
    paths = [f"{directory}/a", f"{directory}/b"]
    options = SaveOptions(process_timeout_seconds=3)
    try:
        match kind:
            case "value":
                jaxckpt.save(paths[0], {**state, "step": index}, options=options)
            case "leaves":
                jaxckpt.save(paths[0], {**state, **{f"more-{n}": n for n in range(index)}}, options=options)
            case "path":
                jaxckpt.save(f"{directory}/of-{index}", state, options=options)
            case "bad leaf":
                jaxckpt.save(paths[0], {**state, "f": print if index else 1}, options=options)
            case "order":
                for path in paths if index else reversed(paths):
                    jaxckpt.save(path, state, options=options)
            case "late":
                if index == 0:
                    jaxckpt.save(paths[0], state, options=options)
            case "arrays":
                value = on_all(SHARDED[: 48 << index], PartitionSpec("x"))
                asyncio.run(jaxckpt.async_serialize([value], paths[:1], options=options))
    except jaxckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def with_fault(index: int, path: str, culprit: int, phase: str, fault: str) -> tuple[str, float]:
    """Save an older and a newer tree; the culprit fails in a phase of the newer. What is raised, after how long."""
    old = {"w": on_all(SHARDED, PartitionSpec("x")), "v": on_all(SHARDED[:8], PartitionSpec())}
    new = jax.tree.map(lambda array: array + 1, old)
    jax.block_until_ready(new)
    jaxckpt.save(path, old)
    cluster.send("ready")
    if index == culprit:
        if phase == "begin" and fault in ("SIGSTOP", "SIGKILL"):
            os.kill(os.getpid(), signal.Signals[fault])
        inject(phase, lambda: happen(fault))
    began = time.monotonic()
    options = SaveOptions(process_timeout_seconds=4)
    try:
        jaxckpt.save(path, new, overwrite=True, options=options)
        outcome = "saved"
    except (jaxckpt.CheckpointError, OSError) as error:
        outcome = f"{type(error).__name__}: {error}"
    return outcome, time.monotonic() - began


def happen(fault: str) -> None:
    match fault:
        case "SIGSTOP" | "SIGKILL":
            os.kill(os.getpid(), signal.Signals[fault])
        case "ENOSPC":
            raise jaxckpt.StorageError(28, "No space left on device", "the disk")
        case _:
            raise RuntimeError("a bug of the process")


def inject(phase: str, fault: Callable[[], None]) -> None:
    """Let `fault` happen when this process next comes to a phase."""
    owner, name = {
        "begin": (_commit.Attempt, "begin" if jax.process_index() == 0 else "join"),
        "write": (_store, "hashes"),
        "records": (_writer.Writer, "layouts"),
        "commit": (_commit.Attempt, "publish") if jax.process_index() == 0 else (_processes.Conversation, "hear"),
    }[phase]
    original = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if name != "hear" or "commit" in args:
            setattr(owner, name, original)
            fault()
        return original(*args, **kwargs)

    setattr(owner, name, faulty)


def restore_both(index: int, path: str) -> float:
    """The value that all of the checkpoint's leaves are above those of the older tree."""
    found = jaxckpt.restore(path)
    above = {float(value) for value in np.unique(found["w"] - SHARDED)} | {
        float(value) for value in np.unique(found["v"] - SHARDED[:8])
    }
    assert len(above) == 1, above
    return above.pop()


def save_again(index: int, path: str) -> None:
    jaxckpt.save(path, tree(), overwrite=True)
