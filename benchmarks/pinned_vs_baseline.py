"""Save and restore sharded arrays: the staged baseline, pinned, direct and auto beside their peers, in one run.

    python benchmarks/pinned_vs_baseline.py [--quick] [--dir DIR] [--json FILE] [--plot FILE]

Workloads: `big` is 1 GiB in 8 float32 arrays, each sharded over all devices; `small` is 2,000 leaves of 64 KiB,
replicated over all devices; the sweep is one array, by size and by the number of devices that it is sharded over, saved
by jaxckpt alone. The bits are random, so nothing compresses.

Figures: `blocked`, until the call returns to the caller; `durable`, until the bytes are on disk as far as the
variant goes (see its note); `restore`, onto the same sharding, and hash-verified by jaxckpt alone; the peak of
resident memory above the arrays themselves, for the save and for the restore. Every turn saves new arrays, as a
training loop does, because JAX keeps the host copy of an array that was once gathered. The saved files are moved
before they are restored, so that they come from the page cache and not from a cache of the process that saved them.

The device-to-host leg of the sweep is also timed by itself, into memory that is allocated for it: staged through 128
MiB, with one pinned transfer a shard, with all of these at once, and one pinned transfer of a single array of as many
bytes, by which the others and the whole saves are measured.

On a machine without an accelerator 8 CPU devices are made; on a GPU the ones that are there are used.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from _harness import (
    MIB,
    Figures,
    PeakMemory,
    Ratio,
    Samples,
    Worker,
    arguments,
    in_child,
    interleave,
    medians,
    plot,
    print_machine,
    print_table,
    records,
    show,
    touch_free_memory,
    use_cpu_devices,
    write_json,
)
from _legs import LARGE, ONE_BY_ONE, OVERLAPPED, STAGED, seconds_of, ways
from _legs import rates as leg_rates
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt

Tree = dict[str, jax.Array]
Like = dict[str, jax.ShapeDtypeStruct]
Wait = Callable[[], object]
Mode = Literal["staged", "pinned", "direct", "auto"]

ROW_BYTES = 512
MODES: tuple[Mode, ...] = get_args(Mode)
FIGURES = ("blocked_seconds", "durable_seconds", "restore_seconds", "save_peak_bytes", "restore_peak_bytes")


class WrongValuesError(Exception):
    """A variant restored something else than was saved."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Float32 leaves of random bits, and how they lie on the devices.

    Args:
        name: What tables call it.
        leaves: How many arrays.
        leaf_bytes: Bytes of each array; a multiple of 512 bytes x `devices`.
        devices: How many devices hold each array.
        replicated: Whether each of them holds all of it, or its share of the rows.
    """

    name: str
    leaves: int
    leaf_bytes: int
    devices: int
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        return self.leaves * self.leaf_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes on all devices together."""
        return self.nbytes * (self.devices if self.replicated else 1)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.leaf_bytes // ROW_BYTES, ROW_BYTES // 4)

    def sharding(self) -> NamedSharding:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: self.devices]), ("x",))
        return NamedSharding(mesh, PartitionSpec() if self.replicated else PartitionSpec("x"))

    def host(self) -> dict[str, np.ndarray]:
        """The values, the same in every process."""
        arrays = np.random.SFC64(0).random_raw(self.nbytes // 8).view(np.float32).reshape(self.leaves, *self.shape)
        return {f"layer{number:05}": array for number, array in enumerate(arrays)}

    def on_devices(self) -> Tree:
        return jax.block_until_ready(jax.device_put(self.host(), self.sharding()))

    def like(self) -> Like:
        leaf = jax.ShapeDtypeStruct(self.shape, np.dtype(np.float32), sharding=self.sharding())
        return {f"layer{number:05}": leaf for number in range(self.leaves)}


def big(scale: float) -> Workload:
    """1 GiB in 8 arrays, sharded over all devices; `scale` lowers their number, and shrinks the last one left."""
    leaves = max(1, round(8 * scale))
    return Workload("big", leaves, whole_rows(1024 * MIB * scale / leaves), jax.device_count())


def small(scale: float) -> Workload:
    """2,000 leaves of 64 KiB, replicated over all devices; `scale` lowers their number."""
    return Workload("small", max(1, round(2000 * scale)), 64 << 10, jax.device_count(), replicated=True)


def sweep(sizes_mib: Sequence[int], shard_counts: Sequence[int]) -> list[Workload]:
    """One array of each size over each number of devices that this machine has."""
    return [
        Workload(f"{size} MiB / {shards}", 1, size * MIB, shards)
        for size in sizes_mib
        for shards in shard_counts
        if shards <= jax.device_count()
    ]


def whole_rows(nbytes: float) -> int:
    """About `nbytes`, rounded so that every device gets the same number of rows, at least one."""
    unit = ROW_BYTES * jax.device_count()
    return max(1, round(nbytes / unit)) * unit


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to save and restore.

    Args:
        name: What tables call it.
        note: What it does, and how durable its `durable` is.
        begin: Starts to save a tree to a path that does not exist; returns what waits until it is durable.
        restore: Reads a path onto the shardings of `like`; None where there is nothing to compare.
        package: What must be importable for it.
        from_host: It is given numpy arrays, so that what it takes is the write alone.
    """

    name: str
    note: str
    begin: Callable[[Path, Any], Wait]
    restore: Callable[[Path, Like], Tree] | None
    package: str = "jax"
    from_host: bool = False


def begin_jaxckpt(options: jaxckpt.SaveOptions, path: Path, tree: Tree) -> Wait:
    return jaxckpt.start_save(path, tree, options=options).result


def restore_jaxckpt(path: Path, like: Like) -> Tree:
    return jaxckpt.restore(path, like)


def begin_raw(path: Path, tree: dict[str, np.ndarray]) -> Wait:
    """Write every byte into one file, with nothing but `write` and `fsync`."""
    with path.open("xb", buffering=0) as file:
        for array in tree.values():
            _write_all(file.fileno(), array.data.cast("B"))
        os.fsync(file.fileno())
    _fsync(path.parent)
    return _nothing


def begin_jax(path: Path, tree: Tree) -> Wait:
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    manager = GlobalAsyncCheckpointManager()
    manager.serialize_with_paths(list(tree.values()), _leaf_paths(path, tree))
    return manager.wait_until_finished


def restore_jax(path: Path, like: Like) -> Tree:
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    shardings = [leaf.sharding for leaf in like.values()]
    arrays = GlobalAsyncCheckpointManager().deserialize_with_paths(shardings, _leaf_paths(path, like))
    return dict(zip(like, arrays, strict=True))


def begin_jax_zarr3(path: Path, tree: Tree) -> Wait:
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    manager = GlobalAsyncCheckpointManager()
    manager.serialize(list(tree.values()), _zarr3_specs(path, tree))
    return manager.wait_until_finished


def restore_jax_zarr3(path: Path, like: Like) -> Tree:
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

    shardings = [leaf.sharding for leaf in like.values()]
    arrays = GlobalAsyncCheckpointManager().deserialize(shardings, _zarr3_specs(path, like))
    return dict(zip(like, arrays, strict=True))


def _leaf_paths(path: Path, names: Iterable[str]) -> list[str]:
    return [str(path / name) for name in names]


def _zarr3_specs(path: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """One uncompressed Zarr v3 array a leaf, which is also what jaxckpt writes for large leaves."""
    from jax.experimental.array_serialization.tensorstore_impl import get_tensorstore_spec

    return [get_tensorstore_spec(leaf_path, ocdbt=False) for leaf_path in _leaf_paths(path, names)]


@cache
def _orbax() -> Any:
    import orbax.checkpoint

    return orbax.checkpoint.StandardCheckpointer()


def begin_orbax(path: Path, tree: Tree) -> Wait:
    _orbax().save(path, tree)
    return _orbax().wait_until_finished


def restore_orbax(path: Path, like: Like) -> Tree:
    return _orbax().restore(path, like)


def begin_safetensors(path: Path, tree: Tree) -> Wait:
    import safetensors.numpy

    safetensors.numpy.save_file({name: np.asarray(array) for name, array in tree.items()}, path)
    _fsync(path)
    _fsync(path.parent)
    return _nothing


def restore_safetensors(path: Path, like: Like) -> Tree:
    import safetensors.numpy

    return jax.device_put(safetensors.numpy.load_file(path), {name: leaf.sharding for name, leaf in like.items()})


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _nothing() -> None:
    """What is left to wait for when the call itself was the whole save."""


def jaxckpt_variant(name: str, note: str, options: jaxckpt.SaveOptions) -> Variant:
    return Variant(name, note, partial(begin_jaxckpt, options), restore_jaxckpt)


MODE_NOTES = {
    "staged": "the baseline: pieces through a 128 MiB buffer",
    "pinned": "one device_put a shard into pinned host memory",
    "direct": "zero-copy views of device memory",
    "auto": "what the device suggests",
}
PEERS = (
    Variant("raw", "one file, write + fsync, from host memory", begin_raw, None, from_host=True),
    Variant(
        "jax",
        "array_serialization by paths (Zarr v2, zstd); files are fsynced, the directories above are not",
        begin_jax,
        restore_jax,
        "tensorstore",
    ),
    Variant(
        "jax-zarr3",
        "the same by uncompressed Zarr v3 specs, one array a leaf",
        begin_jax_zarr3,
        restore_jax_zarr3,
        "tensorstore",
    ),
    Variant(
        "orbax",
        "StandardCheckpointer; array files are fsynced, its metadata and the final rename are not",
        begin_orbax,
        restore_orbax,
        "orbax.checkpoint",
    ),
    Variant(
        "safetensors",
        "save_file, then our fsync of file and directory; restore through numpy and device_put",
        begin_safetensors,
        restore_safetensors,
        "safetensors",
    ),
)
VARIANTS = {
    variant.name: variant
    for variant in (
        *(jaxckpt_variant(mode, MODE_NOTES[mode], jaxckpt.SaveOptions(transfer=mode)) for mode in MODES),
        *PEERS,
    )
}


def installed(variants: Sequence[Variant]) -> list[Variant]:
    """Those whose package is there; the others are named with the reason."""
    found = []
    for variant in variants:
        if _is_importable(variant.package):
            found.append(variant)
        else:
            print(f"{variant.name}: skipped, {variant.package} is not installed", file=sys.stderr)
    return found


def _is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def save_and_restore(variant: Variant, workload: Workload, cold: bool, directory: Path, check: bool) -> Figures:
    """One turn: save new arrays, move the files, restore them; with `check`, compare every bit.

    Unless `cold`, free memory is touched first (see `touch_free_memory`): enough for the files in the page cache and a
    copy of the arrays, and for a restore as much as the neediest peer takes.
    """
    tree = workload.host() if variant.from_host else workload.on_devices()
    touch_free_memory(0 if cold else 2 * workload.nbytes)
    figures = _timed_save(variant, directory / "saved", tree)
    del tree
    if variant.restore is None:
        return figures
    moved = (directory / "saved").rename(directory / "moved")
    os.sync()
    touch_free_memory(0 if cold else workload.device_bytes + 2 * workload.nbytes)
    with PeakMemory() as memory:
        began = time.perf_counter()
        restored = jax.block_until_ready(variant.restore(moved, workload.like()))
        figures["restore_seconds"] = time.perf_counter() - began
    figures["restore_peak_bytes"] = memory.rise - resident_bytes(restored)
    if check:
        check_equal(variant.name, workload, restored)
    return figures


def _timed_save(variant: Variant, path: Path, tree: Any) -> Figures:
    with PeakMemory() as memory:
        began = time.perf_counter()
        wait = variant.begin(path, tree)
        blocked = time.perf_counter() - began
        wait()
        durable = time.perf_counter() - began
    figures = {"durable_seconds": durable, "save_peak_bytes": memory.rise}
    return figures if variant.from_host else {"blocked_seconds": blocked} | figures


def resident_bytes(tree: Tree) -> int:
    """Bytes of host memory that the arrays themselves hold: every distinct buffer of a CPU device, once."""
    shards = [shard for array in tree.values() for shard in array.addressable_shards if shard.device.platform == "cpu"]
    return sum({shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}.values())


def check_equal(variant: str, workload: Workload, restored: Tree) -> None:
    """Raise `WrongValuesError` unless names, shardings and all bits are those of the workload."""
    expected = workload.host()
    if list(restored) != list(expected):
        raise WrongValuesError(f"{variant}, {workload.name}: restored other leaves than were saved")
    for name, array in restored.items():
        if array.dtype != np.float32 or not array.sharding.is_equivalent_to(workload.sharding(), array.ndim):
            raise WrongValuesError(f"{variant}, {workload.name}, {name}: {array.dtype} on {array.sharding}")
        bits = expected[name].view(np.uint32)
        for shard in array.addressable_shards:
            if not np.array_equal(np.asarray(shard.data).view(np.uint32), bits[shard.index]):
                raise WrongValuesError(f"{variant}, {workload.name}, {name}: other values on {shard.device}")


def compare(
    variants: Sequence[Variant], workloads: Sequence[Workload], options: argparse.Namespace
) -> dict[str, Samples]:
    """Workload name -> the samples of every variant, each variant in a process of its own."""
    with ExitStack() as stack:
        workers = {variant.name: stack.enter_context(Worker()) for variant in variants}
        return {
            workload.name: interleave(
                {v.name: partial(workers[v.name].call, save_and_restore, v, workload, options.cold) for v in variants},
                options.rounds,
                options.dir,
                workload.name,
            )
            for workload in workloads
        }


def legs(workload: Workload, rounds: int) -> dict[str, float]:
    """GB/s of the ways from the devices to the host, for the one array of a point of the sweep."""
    (array,) = workload.on_devices().values()
    whole = jax.block_until_ready(jax.device_put(array, jax.devices()[0], may_alias=False))
    shards = [shard.data for shard in array.addressable_shards]
    return leg_rates({k: partial(seconds_of, way) for k, way in ways(shards, whole).items()}, workload.nbytes, rounds)


def print_legs(found: Mapping[str, dict[str, float]], points: Sequence[Workload], saved: Mapping[str, Samples]) -> None:
    """The rate of each way, and of each whole save, also as a share of that of one large copy."""
    rows = []
    for point in points:
        seconds = {name: figures["durable_seconds"] for name, figures in medians(saved[point.name]).items()}
        rates_of = found[point.name] | {f"save, {n}": point.nbytes / 1e9 / taken for n, taken in seconds.items()}
        rows.append((point.name, rates_of))
    columns = list(rows[0][1])
    print_table(
        "to the host, and whole saves: GB/s, and of one large copy",
        ["size / shards", *columns],
        [[name, *(f"{rate[c]:.2f}  {rate[c] / rate[LARGE]:4.0%}" for c in columns)] for name, rate in rows],
    )


def print_workload(workload: Workload, samples: Samples) -> None:
    """The medians of one workload, and the ratios of jaxckpt's modes to every peer."""
    found = medians(samples)
    print_table(
        f"{workload.name}: {workload.leaves:,} leaves, {workload.nbytes / MIB:,.0f} MiB; medians",
        ["variant", *(_heading(figure) for figure in FIGURES), "note"],
        [
            [name, *(show(figure, figures.get(figure)) for figure in FIGURES), VARIANTS[name].note]
            for name, figures in found.items()
        ],
    )
    modes, peers = [m for m in MODES if m in found], [p.name for p in PEERS if p.name in found]
    if modes and peers:
        print_table(
            f"{workload.name}: jaxckpt / peer, less is better",
            ["", *(f"/ {peer}" for peer in peers)],
            [
                [f"{mode}, {_heading(figure)}", *(_ratio(found[mode], found[peer], figure) for peer in peers)]
                for figure in FIGURES[:3]
                for mode in modes
            ],
        )


def ratios(results: Mapping[str, Samples], found_legs: Mapping[str, dict[str, float]]) -> dict[str, Ratio]:
    """The times of jaxckpt's default mode by those of every peer; the rates of the legs by that of a large copy."""
    shares = {
        f"{point}: {way} / {LARGE}": Ratio(found[way] / found[LARGE], "larger")
        for point, found in found_legs.items()
        for way in (STAGED, ONE_BY_ONE, OVERLAPPED)
    }
    return shares | {
        f"{name}: {_heading(figure)}, auto / {peer.name}": Ratio(found["auto"][figure] / theirs)
        for name, samples in results.items()
        if "auto" in (found := medians(samples))
        for figure in ("durable_seconds", "restore_seconds")
        for peer in PEERS
        if (theirs := found.get(peer.name, {}).get(figure))
    }


def _heading(figure: str) -> str:
    return {"save_peak_bytes": "save peak", "restore_peak_bytes": "restore peak"}.get(figure, figure.split("_")[0])


def _ratio(ours: Figures, theirs: Figures, figure: str) -> str:
    return show("ratio", ours[figure] / theirs[figure]) if theirs.get(figure) else "-"


def print_sweep(results: Mapping[str, Samples]) -> None:
    """Medians by size and number of shards, one table a figure."""
    for figure in FIGURES[:3]:
        rows = [(name, medians(samples)) for name, samples in results.items()]
        columns = list(rows[0][1])
        print_table(
            f"{_heading(figure)}, one array by size and number of shards; medians",
            ["size / shards", *columns],
            [[name, *(show(figure, found[column].get(figure)) for column in columns)] for name, found in rows],
        )


def bars(figure: str, results: Mapping[str, Samples], axes: Any) -> None:
    """Draw the medians of `big` and `small` beside each other, logarithmically."""
    for number, (name, samples) in enumerate(results.items()):
        values = {variant: found[figure] for variant, found in medians(samples).items() if figure in found}
        places = np.arange(len(values)) + 0.4 * number
        axes.bar(places, list(values.values()), 0.4, label=name)
        axes.set_xticks(places - 0.2 * number, list(values), rotation=45, ha="right")
    axes.set(yscale="log", ylabel="seconds", title=_heading(figure))
    axes.legend()


def rates(figure: str, workloads: Sequence[Workload], results: Mapping[str, Samples], axes: Any) -> None:
    """Draw GB/s against the array's size, one line a variant, at the largest number of shards."""
    shards = max(workload.devices for workload in workloads)
    points = [workload for workload in workloads if workload.devices == shards]
    for variant in VARIANTS:
        found = [(w.nbytes, medians(results[w.name]).get(variant, {}).get(figure)) for w in points]
        line = [(nbytes / MIB, nbytes / 1e9 / seconds) for nbytes, seconds in found if seconds]
        if line:
            axes.plot(*zip(*line, strict=True), marker="o", label=variant)
    axes.set(xscale="log", xlabel="MiB", ylabel="GB/s", title=f"{_heading(figure)}, {shards} shards")
    axes.legend()


def leg_lines(workloads: Sequence[Workload], found: Mapping[str, dict[str, float]], axes: Any) -> None:
    """Draw GB/s to the host against the array's size, one line a way, at the largest number of shards."""
    shards = max(workload.devices for workload in workloads)
    points = [workload for workload in workloads if workload.devices == shards]
    for way in found[points[0].name]:
        axes.plot([w.nbytes / MIB for w in points], [found[w.name][way] for w in points], marker="o", label=way)
    axes.set(xscale="log", xlabel="MiB", ylabel="GB/s", title=f"to the host, {shards} shards")
    axes.legend()


def parse() -> argparse.Namespace:
    parser = arguments("Save and restore sharded arrays: jaxckpt's transfer modes beside their peers.")
    parser.add_argument("--quick", action="store_true", help="under a minute: a tenth of the bytes, 3 rounds")
    parser.add_argument("--scale", type=float, help="the fraction of 1 GiB and of 2,000 leaves to use")
    parser.add_argument("--sizes", type=int, nargs="*", metavar="MIB", help="array sizes of the sweep; none: no sweep")
    parser.add_argument("--shards", type=int, nargs="*", metavar="N", help="numbers of devices of the sweep")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="which to run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw here, when matplotlib is installed")
    options = parser.parse_args()
    defaults: dict[str, Any] = (
        {"rounds": 3, "scale": 0.1, "sizes": [4, 32], "shards": [8]}
        if options.quick
        else {"rounds": 5, "scale": 1.0, "sizes": [1, 16, 256, 1024, 4096], "shards": [1, 2, 4, 8]}
    )
    return argparse.Namespace(**vars(options) | {k: v for k, v in defaults.items() if getattr(options, k) is None})


def main() -> None:
    options = parse()
    use_cpu_devices(8)
    print_machine(options.dir)
    variants = installed([VARIANTS[name] for name in options.variants])
    workloads = [big(options.scale), small(options.scale)]
    points = sweep(options.sizes, options.shards)
    results = compare(variants, workloads, options)
    results |= compare([variant for variant in variants if variant.name in MODES], points, options)
    found_legs = {point.name: in_child(legs, point, options.rounds) for point in points}
    for workload in workloads:
        print_workload(workload, results[workload.name])
    swept = {workload.name: results[workload.name] for workload in points}
    if swept:
        print_sweep(swept)
        print_legs(found_legs, points, swept)
    named = {workload.name: results[workload.name] for workload in workloads}
    if options.json:
        found = [record for name, samples in results.items() for record in records(name, samples)]
        found += [
            {"case": point, "variant": way, "figure": "leg_gigabytes_per_second", "median": rate}
            for point, rates_of in found_legs.items()
            for way, rate in rates_of.items()
        ]
        write_json(options.json, "pinned_vs_baseline", options.dir, found, ratios(named, found_legs))
    if options.plot:
        panels = [partial(bars, figure, named) for figure in ("durable_seconds", "restore_seconds")]
        if swept:
            panels += [partial(rates, figure, points, swept) for figure in ("durable_seconds", "restore_seconds")]
            panels.append(partial(leg_lines, points, found_legs))
        plot(options.plot, panels)


if __name__ == "__main__":
    main()
