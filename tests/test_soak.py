"""Many saves and restores, and kills of another process at the same path: nothing grows."""

import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import forked
import jax
import numpy as np
import psutil
import pytest
import soak_child
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt

SEED = int(os.environ.get("JAXCKPT_SEED", time.time_ns() % 1_000_000))
NBYTES = 16 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class Use:
    """What this process and the checkpoint take."""

    rss: int
    files: int
    threads: int
    disk: int

    @classmethod
    def now(cls, path: Path) -> "Use":
        process = psutil.Process()
        disk = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        return cls(process.memory_info().rss, process.num_fds(), threading.active_count(), disk)


def one_cycle(path: Path, generation: int) -> None:
    """Save half on devices and half from numpy, and restore all of it."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
    tree = soak_child.tree(generation, NBYTES)
    tree["same"] = jax.device_put(tree["same"], sharding)
    jaxckpt.save(path, tree, overwrite=True)
    assert generation_at(path) == generation


def generation_at(path: Path) -> int:
    found = jaxckpt.restore(path)
    expected = soak_child.tree(found["step"], NBYTES)
    np.testing.assert_array_equal(found["same"], expected["same"])
    np.testing.assert_array_equal(found["changing"], expected["changing"])
    return found["step"]


def kill_another(path: Path, generation: int, chance: random.Random) -> int:
    """Kill a process that overwrites at a random instant; return the generation that is there then."""
    before = (path / "manifest.json").stat().st_mtime_ns
    process = forked.start(soak_child.overwrite_until_killed, str(path), generation, NBYTES)
    while (path / "manifest.json").stat().st_mtime_ns == before:
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.1))
    process.kill()
    process.join()
    return generation_at(path)


def soak(path: Path, cycles: int, cycles_between_kills: int) -> tuple[list[Use], int, int]:
    """Returns the use after each cycle, the kills, and those that left something for `gc`."""
    chance = random.Random(SEED)
    uses: list[Use] = []
    generation = kills = leftovers = 0
    for cycle in range(cycles):
        generation += 1
        one_cycle(path, generation)
        if cycle % cycles_between_kills == cycles_between_kills - 1:
            generation = kill_another(path, generation, chance)
            kills += 1
            leftovers += bool(jaxckpt.gc(path, grace_seconds=0).removed)
        uses.append(Use.now(path))
    return uses, kills, leftovers


def assert_flat(uses: list[Use]) -> None:
    """From a fifth of the way on, when all pools are full, nothing grows."""
    start, half, end = (uses[len(uses) * at // 10 : len(uses) * at // 10 + len(uses) // 5] for at in (2, 5, 8))
    assert max(use.rss for use in end) <= max(use.rss for use in start) + 48 * MIB
    assert max(use.rss for use in end) <= max(use.rss for use in half) + 32 * MIB
    assert max(use.files for use in end) <= max(use.files for use in start)
    assert max(use.threads for use in end) <= max(use.threads for use in start)
    assert max(use.disk for use in end) <= NBYTES + MIB


def told(uses: list[Use]) -> str:
    first, last = uses[len(uses) // 5], uses[-1]
    return (
        f"memory {first.rss / MIB:.0f} -> {last.rss / MIB:.0f} MiB, files {first.files} -> {last.files}, "
        f"threads {first.threads} -> {last.threads}, disk {first.disk / MIB:.1f} -> {last.disk / MIB:.1f} MiB"
    )


def test_nothing_grows_with_saves_restores_and_kills(tmp_path: Path, long: bool) -> None:
    uses, kills, leftovers = soak(tmp_path / "a", *((1000, 10) if long else (200, 10)))
    print(f"seed {SEED}: {len(uses)} saves and restores of {NBYTES // MIB} MiB, {kills} kills: {told(uses)}")
    print(f"{leftovers} kills left something for gc")
    assert kills == len(uses) // 10
    assert leftovers >= kills // 4
    assert_flat(uses)


def leak_memory(kept: list[object]) -> None:
    kept.append(np.ones(4 * MIB, np.uint8))


def leak_a_file(kept: list[object]) -> None:
    kept.append(open(os.devnull))  # noqa: SIM115


@pytest.mark.parametrize("leak", [leak_memory, leak_a_file])
def test_a_leak_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak: object) -> None:
    kept: list[object] = []
    restore = jaxckpt.restore

    def leaking(path: Path) -> object:
        leak(kept)  # pyright: ignore
        return restore(path)

    monkeypatch.setattr(jaxckpt, "restore", leaking)
    with pytest.raises(AssertionError):
        assert_flat(soak(tmp_path / "a", 30, 100)[0])
    for one in kept:
        getattr(one, "close", int)()


def test_what_stays_on_disk_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt._commit._discard_data", lambda *_: None)
    with pytest.raises(AssertionError):
        assert_flat(soak(tmp_path / "a", 10, 100)[0])
