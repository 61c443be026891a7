"""One large numpy array to several devices, and to one: the ways that people use beside `jaxckpt.put_sharded`.

    python benchmarks/h2d_sharded.py [--quick] [--dir DIR] [--rounds N] [--json FILE] [--plot FILE]

The array is float32[4096, 8192], 128 MiB, its rows sharded over all devices, of which 8 are made where there is no
accelerator; and the whole of it to one device, named in three ways. A transfer ends when the result is ready. Exit code
1 when a bar is missed.

What is compared must do the same. On CPU devices `device_put` makes a view of a numpy array that starts at a multiple
of 64 bytes: nothing is transferred, and who later changes the array changes the result. `put_sharded` never does that,
nor does an accelerator. So there are two sources where the devices are CPUs: `unaligned`, which is what numpy allocates
and every way copies, and `aligned`. Whatever shares memory with its source is found by the addresses, is shown as a
view, and runs once more with a copy of the result, which is then what is compared. A jax.Array cannot be changed, so
that a view of it does no harm, but it is no transfer either, and is treated alike.

Every turn makes several transfers, each result dropped before the next, and counts their median: memory that was just
freed is then used again by whatever allocates, as in a loop that feeds batches.

Source: https://github.com/jax-ml/jax/issues/16905
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    Figures,
    Ratio,
    Samples,
    arguments,
    interleave,
    medians,
    plot,
    print_machine,
    print_table,
    records,
    show,
    use_cpu_devices,
    write_json,
)
from acceptance import Row, verdict
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from pinned_vs_baseline import WrongValuesError

import jaxckpt

Host = np.ndarray[Any, Any]
Put = Callable[[], jax.Array]

COLUMNS = 8192
TRANSFERS = 7
MOST = 1.1
"""`put_sharded` may take this many times as long as the best other way."""
OURS = "put_sharded"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to put an array on devices.

    Args:
        put: Starts it; the result may not be ready yet.
        source: The memory that it reads: a numpy array, or a jax.Array on one CPU device.
        copied: Whether its result is copied, to make it independent of the source.
    """

    put: Put
    source: Any
    copied: bool = False

    def run(self) -> jax.Array:
        result = self.put()
        return jax.block_until_ready(jnp.copy(result) if self.copied else result)


def host_array(rows: int, *, aligned: bool) -> Host:
    """Random numbers that start at a multiple of 64 bytes, or 16 bytes behind one, which is where numpy starts."""
    nbytes = rows * COLUMNS * 4
    raw = np.empty(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + (0 if aligned else 16)
    array = raw[start : start + nbytes].view(np.float32).reshape(rows, COLUMNS)
    array[...] = np.random.default_rng(0).random(array.shape, np.float32)
    return array


def one_by_one(host: Host, sharding: Sharding) -> jax.Array:
    shards = [jax.block_until_ready(jax.device_put(host[at], device)) for device, at in _indices(host, sharding)]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


def overlapped(host: Host, sharding: Sharding) -> jax.Array:
    shards = [jax.device_put(host[at], device) for device, at in _indices(host, sharding)]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


def _indices(host: Host, sharding: Sharding) -> Any:
    return sharding.addressable_devices_indices_map(host.shape).items()


def many_devices(host: Host) -> dict[str, Way]:
    """The ways onto all devices."""
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
    on_cpu = jax.device_put(host, jax.local_devices(backend="cpu")[0])
    return {
        "device_put": Way(partial(jax.device_put, host, sharding), host),
        "device_put of a CPU jax.Array": Way(partial(jax.device_put, on_cpu, sharding), on_cpu),
        "one device after the other": Way(partial(one_by_one, host, sharding), host),
        "all devices overlapped": Way(partial(overlapped, host, sharding), host),
        OURS: Way(partial(jaxckpt.put_sharded, host, sharding), host),
    }


def one_device(host: Host) -> dict[str, Way]:
    """The ways onto one device, by how it is named."""
    device = jax.devices()[0]
    named = NamedSharding(jax.sharding.Mesh([device], ("x",)), PartitionSpec("x"))
    single = SingleDeviceSharding(device)
    targets = {"Device": device, "NamedSharding": named, "SingleDeviceSharding": single}
    puts = {f"device_put, {name}": Way(partial(jax.device_put, host, to), host) for name, to in targets.items()}
    ours = {"NamedSharding": named, "SingleDeviceSharding": single}
    return puts | {f"{OURS}, {name}": Way(partial(jaxckpt.put_sharded, host, to), host) for name, to in ours.items()}


def is_view(result: jax.Array, source: Any) -> bool:
    """Whether a shard of `result` lies in the memory of `source`."""
    if next(iter(result.sharding.device_set)).platform != "cpu":
        return False
    start = source.ctypes.data if isinstance(source, np.ndarray) else source.unsafe_buffer_pointer()
    pointers = [shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards]
    return any(start <= pointer < start + source.nbytes for pointer in pointers)


def with_copies(ways: Mapping[str, Way]) -> tuple[dict[str, Way], set[str]]:
    """The ways, those whose result is a view also with a copy of it; and the names of the views."""
    views = {name for name, way in ways.items() if is_view(way.run(), way.source)}
    found: dict[str, Way] = {}
    for name, way in ways.items():
        found[f"{name}: a view" if name in views else name] = way
        if name in views:
            found[f"{name}, then a copy"] = Way(way.put, way.source, copied=True)
    return found, {f"{name}: a view" for name in views}


def transfer(way: Way, host: Host, _directory: Path, check: bool) -> Figures:
    """One turn."""
    seconds = []
    for _ in range(TRANSFERS):
        began = time.perf_counter()
        result = way.run()
        seconds.append(time.perf_counter() - began)
        if check and not np.array_equal(np.asarray(result), host):
            raise WrongValuesError(f"other values than the array has, on {result.sharding}")
        del result
    return {"transfer_seconds": statistics.median(seconds)}


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured of one source and one set of devices."""

    name: str
    nbytes: int
    samples: Samples
    views: set[str]

    @property
    def seconds(self) -> dict[str, float]:
        return {way: figures["transfer_seconds"] for way, figures in medians(self.samples).items()}

    def rows(self) -> list[Row]:
        """What `put_sharded` takes, as a multiple of the best of the others that are no views."""
        others = {w: s for w, s in self.seconds.items() if w not in self.views and not w.startswith(OURS)}
        best = min(others, key=others.__getitem__)
        return [
            Row(
                "h2d",
                f"{self.name}: {way} / best other",
                "ratio",
                seconds / others[best],
                MOST,
                f"{show('_seconds', seconds)} / {show('_seconds', others[best])}, {best}",
            )
            for way, seconds in self.seconds.items()
            if way.startswith(OURS)
        ]


def measure(options: argparse.Namespace) -> list[Case]:
    rows = max(1, round(4096 * options.scale / jax.device_count())) * jax.device_count()
    on_cpu = jax.devices()[0].platform == "cpu"
    cases = []
    for source in ("unaligned", "aligned") if on_cpu else ("numpy",):
        host = host_array(rows, aligned=source == "aligned")
        for where, ways_of in ((f"rows over {jax.device_count()}", many_devices), ("one device", one_device)):
            ways, views = with_copies(ways_of(host))
            turns = {name: partial(transfer, way, host) for name, way in ways.items()}
            name = f"{where}, {source}"
            cases.append(Case(name, host.nbytes, interleave(turns, options.rounds, options.dir, name), views))
    return cases


def print_case(case: Case) -> None:
    print_table(
        f"{case.name}: {case.nbytes / 2**20:,.0f} MiB; medians",
        ["way", "transfer", "GB/s"],
        [
            [way, show("_seconds", seconds), "-" if way in case.views else f"{case.nbytes / seconds / 1e9:.1f}"]
            for way, seconds in case.seconds.items()
        ],
    )


def bars(case: Case, axes: Any) -> None:
    """Draw the GB/s of every way that is no view."""
    rates = {way: case.nbytes / seconds / 1e9 for way, seconds in case.seconds.items() if way not in case.views}
    axes.barh(list(rates), list(rates.values()), color=["C1" if way.startswith(OURS) else "C0" for way in rates])
    axes.invert_yaxis()
    axes.set(xlabel="GB/s", title=case.name)


def main() -> int:
    parser = arguments("One large numpy array to several devices, and to one.")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the array, to try the script out")
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw here, when matplotlib is installed")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 9)
    use_cpu_devices(8)
    print_machine(options.dir)
    cases = measure(options)
    for case in cases:
        print_case(case)
    rows = [row for case in cases for row in case.rows()]
    print_table(
        f"put_sharded beside the best other way, medians of {options.rounds} rounds",
        ["figure", "bar, at most", "measured", "detail", "verdict"],
        [[r.what, show(r.figure, r.most), show(r.figure, r.measured), r.detail, verdict(r)] for r in rows],
    )
    if options.json:
        results = [record for case in cases for record in records(case.name, case.samples)]
        results += [asdict(row) | {"passed": row.passed} for row in rows]
        ratios = {row.what: Ratio(row.measured) for row in rows}
        write_json(options.json, "h2d_sharded", options.dir, results, ratios)
    if options.plot:
        plot(options.plot, [partial(bars, case) for case in cases])
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
