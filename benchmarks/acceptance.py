"""The bars that jaxckpt must pass, each beside its figure as measured; exit code 1 when one is missed.

    python benchmarks/acceptance.py [--only big small ...] [--dir DIR] [--rounds N] [--json FILE]

The workloads and the peers are those of `pinned_vs_baseline.py`, and jaxckpt runs with its default options unless a
row says otherwise. Every figure is a median over the rounds. `--scale` shrinks the workloads to try the script out:
the bars are meant for the full size, and a scaled run says so.
"""

import argparse
import asyncio
import gc
import mmap
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _harness import (
    MIB,
    Figures,
    Samples,
    Turn,
    arguments,
    fresh_directory,
    in_child,
    interleave,
    medians,
    print_machine,
    print_table,
    settled_rss,
    show,
    use_cpu_devices,
    write_json,
)
from pinned_vs_baseline import (
    MODES,
    VARIANTS,
    Like,
    Mode,
    Tree,
    Workload,
    WrongValuesError,
    big,
    check_equal,
    compare,
    installed,
    jaxckpt_variant,
    small,
    whole_rows,
)

import jaxckpt

BUDGET_BYTES = 256 * MIB
BUDGETED: tuple[Mode, ...] = ("pinned", "staged")


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and its bar.

    Args:
        area: The part of the table, as `--only` names it.
        what: What was measured.
        figure: A name that ends with the unit, `_seconds` or `_bytes`; a ratio otherwise.
        measured: Median.
        most: The largest value that passes; None for a figure that is only shown.
        detail: What a ratio is made of.
    """

    area: str
    what: str
    figure: str
    measured: float
    most: float | None = None
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.most is None or self.measured <= self.most


def compared(names: Sequence[str], workload: Workload, options: argparse.Namespace) -> dict[str, Figures]:
    """The medians of jaxckpt's default mode and the peers named, as far as they are installed."""
    variants = installed([VARIANTS[name] for name in ("auto", *names)])
    return medians(compare(variants, [workload], options)[workload.name])


def ratios(area: str, found: dict[str, Figures], figure: str, bars: dict[str, float]) -> list[Row]:
    """One row for every peer that was measured: jaxckpt's figure as a multiple of the peer's."""
    what, ours = figure.removesuffix("_seconds"), found["auto"][figure]
    return [
        ratio(area, f"{area}: {what} / {peer}", figure, ours, found[peer][figure], most)
        for peer, most in bars.items()
        if peer in found
    ]


def ratio(area: str, what: str, figure: str, ours: float, theirs: float, most: float) -> Row:
    detail = f"{show(figure, ours)} / {show(figure, theirs)}"
    return Row(area, what, "ratio", ours / theirs, most, detail)


def measure_big(options: argparse.Namespace) -> list[Row]:
    found = compared(("raw", "jax", "orbax"), big(options.scale), options)
    return [
        *ratios("big", found, "durable_seconds", {"raw": 1.0, "jax": 0.5, "orbax": 0.35}),
        Row("big", "big: start_save returns", "blocked_seconds", found["auto"]["blocked_seconds"], 0.020),
        *ratios("big", found, "restore_seconds", {"orbax": 1 / 4, "jax": 1 / 10}),
        Row("big", "big: peak memory of a save", "save_peak_bytes", found["auto"]["save_peak_bytes"], 128 * MIB),
    ]


def measure_small(options: argparse.Namespace) -> list[Row]:
    found = compared(("raw", "jax", "orbax", "safetensors"), small(options.scale), options)
    durable = {"raw": 1.8, "jax": 1 / 18, "orbax": 1 / 60, "safetensors": 1.5}
    return [
        *ratios("small", found, "durable_seconds", durable),
        Row("small", "small: start_save returns", "blocked_seconds", found["auto"]["blocked_seconds"], 0.060),
        *ratios("small", found, "restore_seconds", {"orbax": 1 / 10, "jax": 1 / 16, "safetensors": 0.8}),
    ]


def measure_memory(options: argparse.Namespace) -> list[Row]:
    """Peak memory of a save whose budget is a quarter of the bytes, in the modes that copy."""
    workload = big(options.scale)
    variants = [
        jaxckpt_variant(mode, "", jaxckpt.SaveOptions(transfer=mode, max_host_bytes=BUDGET_BYTES)) for mode in BUDGETED
    ]
    found = medians(compare(variants, [workload], options)[workload.name])
    most = BUDGET_BYTES + 64 * MIB
    return [
        Row("memory", f"big: peak memory, {mode}, 256 MiB budget", "save_peak_bytes", figures["save_peak_bytes"], most)
        for mode, figures in found.items()
    ]


def measure_mapped(options: argparse.Namespace) -> list[Row]:
    found = medians(in_child(mapped_samples, big(options.scale), options.rounds, options.dir))["mapped"]
    return [
        Row("mapped", "big: memory-mapped restore", "plain_seconds", found["plain_seconds"], 0.050),
        Row("mapped", "big: memory-mapped restore, verified", "verified_seconds", found["verified_seconds"]),
    ]


def mapped_samples(workload: Workload, rounds: int, parent: Path) -> Samples:
    """Time memory-mapped restores of one checkpoint, with and without a look at its bytes."""

    def turn(_directory: Path, check: bool) -> Figures:
        figures = {}
        for name, verify in (("plain_seconds", False), ("verified_seconds", True)):
            restore_options = jaxckpt.RestoreOptions(memory_map=True, verify=verify)
            gc.collect()
            began = time.perf_counter()
            restored = jax.block_until_ready(jaxckpt.restore(path, workload.like(), options=restore_options))
            figures[name] = time.perf_counter() - began
            if check:
                check_equal("memory-mapped", workload, restored)
        return figures

    with fresh_directory(parent) as directory:
        path = directory / "checkpoint"
        jaxckpt.save(path, workload.on_devices())
        return interleave({"mapped": turn}, rounds, parent, "memory-mapped restore")


def measure_verification(options: argparse.Namespace) -> list[Row]:
    found = medians(in_child(verification_samples, big(options.scale), options.rounds, options.dir))["verification"]
    cost = found["verified_seconds"] - found["unverified_seconds"]
    return [
        ratio(
            "trust",
            "big: verification's share of a warm restore",
            "verified_seconds",
            cost,
            found["verified_seconds"],
            0.35,
        ),
        Row("trust", "big: verify()", "verify_seconds", found["verify_seconds"]),
    ]


def verification_samples(workload: Workload, rounds: int, parent: Path) -> Samples:
    """Time warm restores of one checkpoint with and without verification, and `verify`, which restores nothing."""

    def turn(_directory: Path, check: bool) -> Figures:
        figures = {}
        for name, verify in (("unverified_seconds", False), ("verified_seconds", True)):
            gc.collect()
            began = time.perf_counter()
            options = jaxckpt.RestoreOptions(verify=verify)
            restored = jax.block_until_ready(jaxckpt.restore(path, workload.like(), options=options))
            figures[name] = time.perf_counter() - began
            if check:
                check_equal("restored", workload, restored)
            del restored
        report = jaxckpt.verify(path)
        if not report.ok:
            raise WrongValuesError(f"verify found {len(report.faults)} faults in a sound checkpoint")
        return figures | {"verify_seconds": report.seconds}

    with fresh_directory(parent) as directory:
        path = directory / "checkpoint"
        jaxckpt.save(path, workload.on_devices())
        return interleave({"verification": turn}, rounds, parent, "verification")


def measure_reads(options: argparse.Namespace) -> list[Row]:
    found = in_child(read_ratios, big(options.scale), options.dir)
    return [Row("reads", f"{what}: bytes read / needed", "ratio", ratio, 1.1) for what, ratio in found.items()]


def read_ratios(workload: Workload, parent: Path) -> Figures:
    """Bytes read as a multiple of the bytes needed, for three restores that need some or all of a checkpoint.

    Afterwards it proves that each of them verifies what it reads.
    """
    likes = {
        "big onto 1 device": on_first_devices(workload, 1).like(),
        "big onto 4 devices": on_first_devices(workload, 4).like(),
        "one leaf of 8": dict([next(iter(workload.like().items()))]),
    }
    with fresh_directory(parent) as directory:
        path = directory / "checkpoint"
        jaxckpt.save(path, workload.on_devices())
        jaxckpt.restore(path, workload.like())
        found = {what: bytes_read(path, like) / needed_bytes(like) for what, like in likes.items()}
        host = workload.host()
        for like in likes.values():
            check_verifies(path, like, host)
    return found


def on_first_devices(workload: Workload, devices: int) -> Workload:
    """The same arrays over the first `devices` devices, or over all where there are fewer."""
    return replace(workload, devices=min(devices, jax.device_count()))


def needed_bytes(like: Like) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in like.values())


def bytes_read(path: Path, like: Like) -> int:
    """Bytes that a restore reads, from the disk or the page cache.

    `rchar` in /proc/self/io counts what read calls of any kind return, in all threads of this process. It does not
    see what is touched through a memory map, and then it would fall short of the bytes needed, which is an error.
    """
    before = _rchar()
    jax.block_until_ready(restore_part(path, like))
    read = _rchar() - before
    if read < needed_bytes(like):
        raise RuntimeError(
            f"{read} bytes were seen being read where {needed_bytes(like)} were needed; rchar misses some"
        )
    return read


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def restore_part(path: Path, like: Like) -> Tree:
    return jaxckpt.restore(path, like, options=jaxckpt.RestoreOptions(partial=True))


def check_verifies(path: Path, like: Like, host: dict[str, np.ndarray]) -> None:
    """Flip a stored bit in some of the leaves that `like` names; each time the restore must refuse."""
    chance = random.Random(0)
    for name in chance.sample(sorted(like), min(3, len(like))):
        stored = chance.choice(host[name]).tobytes()
        altered = bytes([stored[0] ^ 1]) + stored[1:]
        _replace_on_disk(path, stored, altered)
        try:
            restore_part(path, like)
        except jaxckpt.CorruptCheckpointError:
            _replace_on_disk(path, altered, stored)
        else:
            raise RuntimeError(f"a restore did not notice a flipped bit of {name}")


def _replace_on_disk(checkpoint: Path, old: bytes, new: bytes) -> None:
    """Overwrite random, and so unique, bytes in whichever file of the checkpoint holds them."""
    for file in checkpoint.rglob("*"):
        if file.is_file() and file.stat().st_size:
            with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as stored:
                start = stored.find(old)
                if start >= 0:
                    stored[start : start + len(new)] = new
                    return
    raise RuntimeError("the bytes of a leaf are not in the files of its checkpoint; are they compressed?")


def measure_stalls(options: argparse.Namespace) -> list[Row]:
    scalars = scalar_count(options.scale)
    found = medians(in_child(stall_samples, big(options.scale), scalars, options.rounds, options.dir))
    bars = {f"async_serialize of big, {mode}": 0.020 for mode in MODES} | {SAVE_SCALARS: 0.050}
    return [
        Row("stalls", f"longest stall of the loop: {what}", "stall_seconds", figures["stall_seconds"], bars.get(what))
        for what, figures in found.items()
    ]


SAVE_SCALARS = "save_async of 20,000 leaves"


def stall_samples(workload: Workload, scalars: int, rounds: int, parent: Path) -> Samples:
    """The longest stall of an event loop while each mode serializes, while scalars are saved, and while it is idle."""

    def serialize(mode: Mode, directory: Path, _check: bool) -> Figures:
        tree = workload.on_devices()
        paths = [directory / name for name in tree]
        options = jaxckpt.SaveOptions(transfer=mode)
        return _stall(lambda: jaxckpt.async_serialize(list(tree.values()), paths, options=options))

    def save(directory: Path, _check: bool) -> Figures:
        tree = scalar_tree(scalars)
        return _stall(lambda: jaxckpt.save_async(directory / "checkpoint", tree))

    def idle(_directory: Path, _check: bool) -> Figures:
        return _stall(lambda: asyncio.sleep(0.5))

    modes: dict[str, Turn] = {f"async_serialize of big, {mode}": partial(serialize, mode) for mode in MODES}
    return interleave({**modes, SAVE_SCALARS: save, "nothing, for comparison": idle}, rounds, parent, "stalls")


def _stall(work: Callable[[], Coroutine[Any, Any, object]]) -> Figures:
    gc.collect()
    return {"stall_seconds": asyncio.run(longest_stall(work))}


async def longest_stall(work: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """The most seconds by which a task that sleeps 1 ms at a time, beside `work` in one loop, woke up late."""
    pause_seconds = 0.001
    worst = 0.0

    async def beat() -> None:
        nonlocal worst
        while True:
            began = time.perf_counter()
            await asyncio.sleep(pause_seconds)
            worst = max(worst, time.perf_counter() - began - pause_seconds)

    async with asyncio.TaskGroup() as tasks:
        heart = tasks.create_task(beat())
        await asyncio.sleep(5 * pause_seconds)
        await work()
        await asyncio.sleep(5 * pause_seconds)
        heart.cancel()
    return worst


def scalar_count(scale: float) -> int:
    """20,000, or fewer when scaled; a multiple of 10."""
    return max(1, round(2000 * scale)) * 10


def scalar_tree(count: int) -> Tree:
    """`count` float32 scalars, each a jax.Array on the default device."""
    values = {f"scalar{number:05}": np.float32(number) for number in range(count)}
    return jax.block_until_ready(jax.device_put(values, jax.devices()[0]))


def measure_leaves(options: argparse.Namespace) -> list[Row]:
    many = scalar_count(options.scale)
    found = medians(in_child(leaf_samples, [many // 10, many], options.rounds, options.dir))
    few, most = (found[f"{count} scalars"] for count in (many // 10, many))
    save, restore = "save_seconds", "restore_seconds"
    return [
        Row("leaves", "20,000 scalar leaves: save", save, most[save], 3.0),
        Row("leaves", "20,000 scalar leaves: restore", restore, most[restore]),
        ratio("leaves", "save of 20,000 scalars / of 2,000", save, most[save], few[save], 12.0),
        ratio("leaves", "restore of 20,000 scalars / of 2,000", restore, most[restore], few[restore], 12.0),
    ]


def leaf_samples(counts: Sequence[int], rounds: int, parent: Path) -> Samples:
    """Save and restore trees of scalars, by the number of leaves."""

    def turn(count: int, directory: Path, check: bool) -> Figures:
        tree = scalar_tree(count)
        gc.collect()
        began = time.perf_counter()
        jaxckpt.save(directory / "checkpoint", tree)
        saved = time.perf_counter()
        restored = jax.block_until_ready(jaxckpt.restore(directory / "checkpoint", tree))
        figures = {"save_seconds": saved - began, "restore_seconds": time.perf_counter() - saved}
        if check and (list(restored) != list(tree) or jax.device_get(restored) != jax.device_get(tree)):
            raise WrongValuesError(f"{count} scalars were restored with other names or values")
        return figures

    return interleave({f"{count} scalars": partial(turn, count) for count in counts}, rounds, parent, "scalars")


def measure_floor(options: argparse.Namespace) -> list[Row]:
    saves = max(30, round(100 * options.scale))
    return [
        Row(
            "floor",
            f"growth of the RSS floor over 100 saves of 64 MiB, {mode}",
            "growth_bytes",
            in_child(floor_growth, mode, round(16 * options.scale * MIB), saves, options.dir),
            16 * MIB,
        )
        for mode in ("auto", *BUDGETED)
    ]


def floor_growth(mode: Mode, leaf_bytes: int, saves: int, parent: Path) -> float:
    """By how many bytes the least resident memory of the last quarter of the saves exceeds that of an early quarter.

    Each saves four new arrays. Garbage and free heap are given back before every look, because JAX frees arrays in
    threads of its own: making and dropping such arrays without any save moves the resident memory by 80 MiB.
    """
    workload = Workload("floor", 4, whole_rows(leaf_bytes), jax.device_count())
    resident: list[float] = []
    for _ in range(saves):
        with fresh_directory(parent) as directory:
            options = jaxckpt.SaveOptions(transfer=mode)
            jaxckpt.save(directory / "checkpoint", workload.on_devices(), options=options)
        resident.append(settled_rss())
    quarter = saves // 4
    return min(resident[-quarter:]) - min(resident[10 : 10 + quarter])


AREAS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "big": measure_big,
    "small": measure_small,
    "mapped": measure_mapped,
    "trust": measure_verification,
    "reads": measure_reads,
    "memory": measure_memory,
    "stalls": measure_stalls,
    "leaves": measure_leaves,
    "floor": measure_floor,
}


def verdict(row: Row) -> str:
    if row.most is None:
        return ""
    return "pass" if row.passed else "MISSED"


def main() -> int:
    parser = arguments("The bars that jaxckpt must pass, each beside its figure as measured.")
    parser.add_argument("--only", nargs="+", choices=AREAS, default=list(AREAS), metavar="NAME", help=", ".join(AREAS))
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the workloads, to try the script out")
    parser.set_defaults(rounds=5)
    options = parser.parse_args()
    use_cpu_devices(8)
    print_machine(options.dir)
    if options.scale != 1:
        print(f"note: the workloads are scaled by {options.scale}; the bars are meant for the full size")
    rows = [row for area in options.only for row in AREAS[area](options)]
    print_table(
        f"acceptance, medians of {options.rounds} rounds",
        ["figure", "bar, at most", "measured", "jaxckpt / other", "verdict"],
        [
            [row.what, show(row.figure, row.most), show(row.figure, row.measured), row.detail, verdict(row)]
            for row in rows
        ],
    )
    if options.json:
        write_json(options.json, "acceptance", options.dir, [asdict(row) | {"passed": row.passed} for row in rows])
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
