"""What the benchmarks share: fair rounds, memory peaks, tables, JSON and plots. Linux only.

Time. `interleave` gives every variant one turn a round, in an order that changes, so that whatever the machine does
besides hits all of them and none always follows the same other. A turn gets a fresh directory whose name was never
used before; it is made, and `os.sync()` called, before the turn, and removed after it. Round 0 warms up and checks the
results; it is not counted.

Free memory. Many virtual machines hand memory that is free for about two seconds back to their host ("free page
reporting"), and on the next touch it costs 1 to 3 s/GiB instead of 0.06. That hits hardest whoever just writes: a plain
write of 1 GiB took from 0.5 to 3 s. `touch_free_memory` right before a timed phase lets every variant start with as
much free memory that the machine really has; what a variant needs beyond, it pays for. `--cold` leaves it out.

Memory. A variant that is compared by memory runs in a `Worker`, a process of its own, so that the caches and the
freed heap of one variant are never the baseline of another. There `PeakMemory` reads the kernel's high-water mark of
the resident set (VmHWM), which writing 5 to /proc/self/clear_refs resets: exact, where a sampling thread misses
peaks between its samples and competes for the GIL and a core with what it measures. The heap is collected and
trimmed first, so that memory which a turn reuses counts as much as memory which it asks for.
"""

import argparse
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

MIB = 1 << 20

T = TypeVar("T")

Figures = dict[str, float]
"""Figure -> value. The name ends with its unit: `_seconds`, `_bytes`, or nothing for a ratio. NaN: not measured."""

Turn = Callable[[Path, bool], Figures]
"""Runs once in the fresh directory given. With True it also checks its results, outside what it times."""

Samples = dict[str, dict[str, list[float]]]
"""Variant -> figure -> its value in each round."""

PACKAGES = ("jaxckpt", "jax", "jaxlib", "tensorstore", "numpy", "orbax-checkpoint", "safetensors")


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes; a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="write here: a real disk (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="rounds behind every median (default: 5)")
    parser.add_argument("--cold", action="store_true", help="do not touch free memory before a timed phase")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures here")
    return parser


def use_cpu_devices(count: int) -> None:
    """Have JAX make `count` CPU devices, in this process and its workers, unless XLA_FLAGS already says how many.

    Call it before JAX's first use. On an accelerator it changes nothing, and memory is then
    allocated as needed, because each worker is one more process on the same device.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def interleave(turns: Mapping[str, Turn], rounds: int, parent: Path, title: str) -> Samples:
    """Time every variant once a round, each in a fresh directory under `parent`."""
    names = list(turns)
    samples: Samples = {name: {} for name in names}
    for number in range(rounds + 1):
        print(f"{title}: {f'round {number} of {rounds}' if number else 'warm-up and check'}", file=sys.stderr)
        for name in random.Random(number).sample(names, len(names)):
            with fresh_directory(parent) as directory, _naming(f"{title}, {name}"):
                figures = turns[name](directory, number == 0)
            if number:
                for figure, value in figures.items():
                    samples[name].setdefault(figure, []).append(value)
    return samples


@contextmanager
def fresh_directory(parent: Path) -> Generator[Path, None, None]:
    """A new directory under `parent`, removed at the end; the disk is idle when it is handed out."""
    directory = Path(tempfile.mkdtemp(prefix="jaxckpt-bench-", dir=parent)).absolute()
    try:
        os.sync()
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def _naming(turn: str) -> Generator[None, None, None]:
    """Add to an error whose turn it was: a worker that was killed for its memory does not say so itself."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the turn of {turn}")
        raise


def medians(samples: Samples) -> dict[str, Figures]:
    """Variant -> figure -> median over the rounds."""
    return {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        for name, figures in samples.items()
    }


class Worker:
    """A process of its own in which functions run one after another; a `with` block ends it.

    One that still holds more than a sixteenth of the machine's memory after a call is replaced by
    a fresh one before the next: TensorStore's cache in JAX's serializer keeps up to 10 GB of what
    it saved, which would push the other variants' files out of the page cache.
    """

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def call(self, function: Callable[..., T], *args: object) -> T:
        """What `function`, which must be importable, returns there; its error is raised here."""
        result = self._pool.submit(function, *args).result()
        if self._pool.submit(trimmed_rss).result() > memory_total() / 16:
            self._pool.shutdown()
            self._start()
        return result

    def _start(self) -> None:
        """Start the process and let it import what it needs while others do the same."""
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._pool.submit(trimmed_rss)


def in_child(function: Callable[..., T], *args: object) -> T:
    """What `function`, which must be importable, returns in a fresh process."""
    with Worker() as worker:
        return worker.call(function, *args)


class PeakMemory:
    """The most resident memory in a `with` block above what there was at its start: `rise`, in bytes.

    NaN where the kernel does not let a process reset its own high-water mark.
    """

    rise: float

    def __enter__(self) -> Self:
        self._before = settled_rss()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._before = math.nan
        return self

    def __exit__(self, *error: object) -> None:
        self.rise = _status_bytes("/proc/self/status", "VmHWM") - self._before


def touch_free_memory(nbytes: int) -> None:
    """Use `nbytes` of free memory and free them again, so that they are backed by real memory for a moment.

    numpy asks for huge pages, which go back to the kernel in the large blocks that the page cache takes next.
    """
    np.empty(nbytes, np.uint8)[:: os.sysconf("SC_PAGE_SIZE")] = 1


def settled_rss() -> float:
    """This process's resident memory, in bytes, after garbage and free heap have been given back."""
    gc.collect()
    return trimmed_rss()


def trimmed_rss() -> int:
    """This process's resident memory, in bytes, after free heap has been given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_total() -> int:
    """The machine's memory, in bytes."""
    return _status_bytes("/proc/meminfo", "MemTotal")


def _status_bytes(file: str, field: str) -> int:
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def machine(directory: Path) -> dict[str, Any]:
    """Where the figures were taken: processor, cores, memory in bytes, file system of `directory`, devices."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_total(),
        "file_system": _file_system(directory),
        "kernel": platform.release(),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages compared, those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _file_system(directory: Path) -> str:
    """The type of the file system that holds `directory`: the one mounted on the longest path above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(point, kind) for point, kind in mounts if directory.resolve().is_relative_to(point)]
    return max(above, key=lambda mount: len(mount[0]))[1]


def print_machine(directory: Path) -> None:
    """Say what runs where, so that a table that is pasted elsewhere can be judged."""
    about = machine(directory)
    memory = about["memory_bytes"] / 2**30
    print(f"{about['cpu']}, {about['cores']} cores, {memory:.0f} GiB, {about['file_system']} at {directory.resolve()}")
    print(f"{len(about['devices'])} x {about['devices'][0]}; {', '.join(f'{k} {v}' for k, v in versions().items())}")
    if about["file_system"] in ("tmpfs", "ramfs"):
        print("note: this is memory, not a disk, so fsync costs nothing; give --dir a directory on a disk")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of text; the first column names the row, the others are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def show(figure: str, value: float | None) -> str:
    """A value as text in the unit that its figure's name ends with."""
    if value is None or math.isnan(value):
        return "-"
    if figure.endswith("_seconds"):
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.{0 if value >= 0.1 else 1}f} ms"
    if figure.endswith("_bytes"):
        return f"{value / MIB:,.0f} MiB" if abs(value) >= 10 * MIB else f"{value / MIB:.1f} MiB"
    return f"{value:.3g} x"


class Ratio(NamedTuple):
    """A figure that means the same on every machine, as far as one does; `run.py` watches it."""

    value: float
    better: Literal["smaller", "larger"] = "smaller"


def records(case: str, samples: Samples) -> list[dict[str, Any]]:
    """The rounds of one case as flat records for the JSON file."""
    return [
        {"case": case, "variant": name, "figure": figure, "median": statistics.median(values), "rounds": values}
        for name, figures in samples.items()
        for figure, values in figures.items()
    ]


def write_json(
    file: Path,
    benchmark: str,
    directory: Path,
    results: Sequence[Mapping[str, Any]],
    ratios: Mapping[str, Ratio] | None = None,
) -> None:
    """Write the results, where they come from, and the ratios to watch. A figure that was not measured becomes null.

    Without `ratios` they are those of the results whose figure is named `ratio` or ends with `_ratio`: less is better.
    """
    document = {
        "benchmark": benchmark,
        "command": sys.argv[1:],
        "versions": versions(),
        "machine": machine(directory),
        "ratios": {name: ratio._asdict() for name, ratio in (ratios_in(results) if ratios is None else ratios).items()},
        "results": results,
    }
    file.write_text(json.dumps(_without_nan(document), indent=1) + "\n")


def ratios_in(results: Sequence[Mapping[str, Any]]) -> dict[str, Ratio]:
    """Those among records of rounds, by their case and variant, and among rows with a bar, by what they say."""
    return {
        row.get("what") or f"{row['case']}: {row['variant']}, {row['figure']}": Ratio(
            row["measured"] if "measured" in row else row["median"]
        )
        for row in results
        if row.get("figure") == "ratio" or str(row.get("figure")).endswith("_ratio")
    }


def _without_nan(value: Any) -> Any:
    match value:
        case float() if math.isnan(value):
            return None
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
        case _:
            return value


def plot(file: Path, panels: Sequence[Callable[[Any], None]]) -> None:
    """Draw one matplotlib `Axes` a panel, side by side, into `file`; without matplotlib, say so."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install 'jaxckpt[plot]')", file=sys.stderr)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes)
    figure.savefig(file, dpi=120)
