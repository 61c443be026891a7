"""What jaxckpt does on one large NVIDIA GPU, each target beside its figure. Within 6 minutes; nothing is downloaded.

    bash benchmarks/gpu_check.sh [--dir DIR] [--json FILE] [--only STEP ...]
    python benchmarks/gpu_check.py --cpu [--scale F]    # the same on the CPU and small, to try the script out

Every step runs in a process of its own, which is ended when it takes too long; what it had measured by then is kept,
what failed is named, and the others go on. Exit code 1 when a step failed, or on a GPU when a target is missed.

- `tests`: the tests marked `gpu`, of transfers, donation and dtypes.
- `transfers`: 4 GiB to the host. `pinned, overlapped` is the copy that a save makes, in 16 arrays, beside one copy of a
  single array of the same bytes; `staged` goes through a 128 MiB buffer; `np.asarray` is asked of arrays that have no
  host copy yet.
- `start_save`: until it returns, of 1, 8 and 24 GiB, with a budget that holds them. The first save of a process has
  pinned memory to allocate, which is shown apart; the target is that of the later ones.
- `donation`: all arrays are donated in the statement after `start_save`, and the checkpoint is compared bit by bit.
- `host_copies`: JAX keeps a host copy on an array that was asked for its values; a save must leave none.
- `limit`: 2 GiB with 1 GB of pinned memory (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB): staged, with one warning. CPU devices
  have no such limit: there the allocation is refused by the script.
- `peers`: 2 GiB saved and restored beside JAX's array_serialization and Orbax; the restore beside the slower of reading
  the files, from the page cache by as many threads as there are cores, and of putting the arrays on the device.
- `lost`: what saving 2 GiB every fifth step takes from a loop of matmuls that donates its state.
- `put_sharded`: `h2d_sharded.py`.
- `resident`: by how much the floor of the resident memory grows over 30 saves of 256 MiB.

The directory should be on a fast disk with 30 GiB free.
"""

import argparse
import json
import operator
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    Ratio,
    fresh_directory,
    print_machine,
    print_table,
    show,
    use_cpu_devices,
    write_json,
)
from _legs import LARGE, OVERLAPPED, STAGED, rates, seconds_of, ways
from acceptance import floor_growth
from h2d_sharded import measure as measure_puts
from lost_step_time import NOTHING, SAVE_EVERY, SAVERS, Loop, run_loop
from pinned_vs_baseline import VARIANTS, Variant, Workload, installed, save_and_restore, whole_rows
from pinned_vs_baseline import _is_importable as is_importable

import jaxckpt
from jaxckpt._transfer import PINNED, host_bytes

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
LEAVES = 16
ROUNDS = 3
TESTS = ("test_async.py", "test_memory.py", "test_leaves.py", "test_put_sharded.py")
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

State = dict[str, jax.Array]
Unit = Literal["seconds", "bytes", "GB/s", "x", ""]


class Figure(NamedTuple):
    """What was measured, and the least and the most that meets its target."""

    what: str
    unit: Unit
    value: float
    least: float | None = None
    most: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


class Scale(NamedTuple):
    """How large the work is, and where: `full` is a GPU's."""

    full: bool
    factor: float
    directory: Path

    def nbytes(self, gib: float) -> int:
        return max(LEAVES * 4096, round(gib * GIB * self.factor))

    @property
    def transfer(self) -> Literal["auto", "pinned"]:
        """What `auto` is on a GPU."""
        return "auto" if self.full else "pinned"

    def options(self, nbytes: int) -> jaxckpt.SaveOptions:
        """With a budget that holds `nbytes`."""
        return jaxckpt.SaveOptions(transfer=self.transfer, max_host_bytes=2 * nbytes + GIB)


def state_of(nbytes: int, leaves: int = LEAVES) -> State:
    """Arrays on the first device, the same each time."""
    return jax.block_until_ready({f"leaf{n}": _numbers(nbytes // leaves // 4, n) for n in range(leaves)})


@partial(jax.jit, static_argnums=0)
def _numbers(size: int, seed: int) -> jax.Array:
    return (jax.lax.iota(jnp.uint32, size) + jnp.uint32(seed)) * jnp.uint32(2654435761)


@cache
def _are_equal() -> Callable[[jax.Array, jax.Array], jax.Array]:
    return jax.jit(lambda one, other: (one == other).all())


@cache
def _inverted() -> Callable[[State], State]:
    return jax.jit(lambda state: jax.tree.map(operator.invert, state), donate_argnums=0)


def differing(path: Path, nbytes: int) -> int:
    """How many leaves of the checkpoint are not those of `state_of`."""
    expected = state_of(nbytes)
    restored = jaxckpt.restore(path, expected)
    return sum(not _are_equal()(restored[name], leaf) for name, leaf in expected.items())


def run_tests(scale: Scale) -> Iterator[Figure]:
    with fresh_directory(scale.directory) as directory:
        report = directory / "report.xml"
        files = [str(ROOT / "tests" / name) for name in TESTS]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            f"--basetemp={directory / 'tmp'}",
        ]
        subprocess.run([*command, f"--junitxml={report}", *files], cwd=ROOT, check=False)
        suite = ElementTree.parse(report).getroot()[0]
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    yield Figure("tests that failed", "", failed, most=0)
    yield Figure("tests that passed", "", count["tests"] - failed - count["skipped"], least=1)


def transfers(scale: Scale) -> Iterator[Figure]:
    nbytes = scale.nbytes(4)
    arrays, whole = list(state_of(nbytes).values()), state_of(nbytes, 1)["leaf0"]

    def as_array() -> float:
        fresh = jax.block_until_ready([jnp.copy(array) for array in arrays])
        return seconds_of(lambda: [np.asarray(array) for array in fresh])

    timed = {name: partial(seconds_of, way) for name, way in ways(arrays, whole).items()}
    found = rates(timed | {"np.asarray": as_array}, nbytes, ROUNDS)
    for name, rate in found.items():
        yield Figure(f"to the host: {name}", "GB/s", rate)
    yield _quotient(f"to the host: {OVERLAPPED} / {LARGE}", found[OVERLAPPED], found[LARGE], 0.9)
    yield _quotient(f"to the host: {OVERLAPPED} / {STAGED}", found[OVERLAPPED], found[STAGED], 5.0)


def _quotient(what: str, ours: float, other: float, least: float) -> Figure:
    return Figure(what, "x", ours / other, least=least, detail=f"{ours:.3g} / {other:.3g}")


def start_saves(scale: Scale) -> Iterator[Figure]:
    for gib, later in ((1, 3), (8, 2), (24, 1)):
        nbytes = scale.nbytes(gib)
        state = state_of(nbytes)
        blocked = [_blocked(scale, state, nbytes) for _ in range(1 + later)]
        del state
        yield Figure(f"start_save of {gib} GiB returns, first", "seconds", blocked[0])
        most = 0.010 if gib == 8 else None
        yield Figure(f"start_save of {gib} GiB returns, later", "seconds", statistics.median(blocked[1:]), most=most)


def _blocked(scale: Scale, state: State, nbytes: int) -> float:
    with fresh_directory(scale.directory) as directory:
        began = time.perf_counter()
        pending = jaxckpt.start_save(directory / "checkpoint", state, options=scale.options(nbytes))
        blocked = time.perf_counter() - began
        pending.result()
    return blocked


def donation(scale: Scale) -> Iterator[Figure]:
    for transfer, gib in ((scale.transfer, 4), ("staged", 1)):
        nbytes = scale.nbytes(gib)
        options = jaxckpt.SaveOptions(transfer=transfer, max_host_bytes=2 * nbytes + GIB)
        with fresh_directory(scale.directory) as directory:
            state = state_of(nbytes)
            jax.block_until_ready(_inverted()(jax.tree.map(jnp.copy, state)))  # compiled before it counts
            pending = jaxckpt.start_save(directory / "checkpoint", state, options=options)
            state = _inverted()(state)
            jax.block_until_ready(state)
            pending.result()
            del state
            wrong = differing(directory / "checkpoint", nbytes)
        yield Figure(f"{gib} GiB donated right after start_save, {transfer}: leaves that differ", "", wrong, most=0)


def host_copies(scale: Scale) -> Iterator[Figure]:
    for transfer in ("auto", "pinned", "staged", "direct"):
        with fresh_directory(scale.directory) as directory:
            state = state_of(scale.nbytes(0.25)) | {"small": jnp.arange(9.0)}
            jaxckpt.save(directory / "checkpoint", state, options=jaxckpt.SaveOptions(transfer=transfer))
            held: list[Any] = [*state.values(), *(array.addressable_data(0) for array in state.values())]
        found = sum(array._npy_value is not None for array in held)
        yield Figure(f"host copies left on the arrays, {transfer}", "", found, most=0)


def limit(scale: Scale) -> Iterator[Figure]:
    nbytes = scale.nbytes(2)
    if not scale.full:
        _refuse_pinned()
    with fresh_directory(scale.directory) as directory, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = state_of(nbytes, 1)
        took = seconds_of(lambda: jaxckpt.save(directory / "checkpoint", state, options=scale.options(nbytes)))
        found = sum("pinned host memory is not to be had" in str(warning.message) for warning in told)
        yield Figure("2 GiB with 1 GB of pinned memory: warnings", "", found, least=1, most=1)
        yield Figure("2 GiB with 1 GB of pinned memory: save", "seconds", took)
        # To numpy, and compared there: the way back to the device takes pinned memory too.
        restored = jaxckpt.restore(directory / "checkpoint", {"leaf0": np.empty(nbytes // 4, np.uint32)})["leaf0"]
        same = np.array_equal(restored, np.arange(nbytes // 4, dtype=np.uint32) * np.uint32(2654435761))
        yield Figure("2 GiB with 1 GB of pinned memory: leaves that differ", "", int(not same), most=0)


def _refuse_pinned() -> None:
    """Let every allocation of pinned memory in this process fail, as a GPU's does at its limit."""
    real = jax.device_put

    def device_put(x: Any, device: Any = None, **keywords: Any) -> Any:
        if any(getattr(one, "memory_kind", None) == PINNED for one in jax.tree.leaves(device)):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: refused by the script")
        return real(x, device, **keywords)

    jax.device_put = device_put


def peers(scale: Scale) -> Iterator[Figure]:
    workload = Workload("big", 8, whole_rows(scale.nbytes(2) / 8), jax.device_count())
    ours = "auto"
    found: dict[str, dict[str, float]] = {}
    for variant in installed([VARIANTS[name] for name in (ours, "jax", "orbax")]):
        try:
            found[variant.name] = _medians(variant, workload, scale.directory)
        except Exception as error:  # what a peer cannot do is told, and the others go on
            if variant.name == ours:
                raise
            print(f"{variant.name} failed: {error!r}", file=sys.stderr)
            yield Figure(f"{variant.name} failed", "", 1, most=0, detail=repr(error)[:200])
            continue
        for figure in ("blocked_seconds", "durable_seconds", "restore_seconds"):
            name = f"{variant.name}, {figure.removesuffix('_seconds')}"
            yield Figure(f"2 GiB: {name}", "seconds", found[variant.name][figure])
    for peer in list(found)[1:]:
        for figure in ("durable_seconds", "restore_seconds"):
            name = f"2 GiB: {figure.removesuffix('_seconds')}, {peer} / jaxckpt"
            yield _quotient(name, found[peer][figure], found[ours][figure], 1.0)
    yield from _restore_rate(scale, workload, workload.nbytes / 1e9 / found[ours]["restore_seconds"])


def _medians(variant: Variant, workload: Workload, parent: Path) -> dict[str, float]:
    """One warm-up, which checks every bit, and two rounds."""
    rounds = []
    for number in range(3):
        with fresh_directory(parent) as directory:
            rounds.append(save_and_restore(variant, workload, True, directory, number == 0))
    return {figure: statistics.median(one[figure] for one in rounds[1:]) for figure in rounds[0]}


def _restore_rate(scale: Scale, workload: Workload, restored: float) -> Iterator[Figure]:
    host = list(workload.host().values())
    sharding = workload.sharding()

    def put_together() -> object:
        return jax.block_until_ready(jax.device_put(host, sharding))

    def put_each() -> object:
        return [jaxckpt.put_sharded(array, sharding) for array in host]

    put = workload.nbytes / 1e9 / min(_median_of(put_together), _median_of(put_each))
    with fresh_directory(scale.directory) as directory:
        jaxckpt.save(directory / "checkpoint", workload.on_devices())
        files = [path for path in (directory / "checkpoint").rglob("*") if path.is_file()]
        read = workload.nbytes / 1e9 / _median_of(partial(_read_all, files))
    yield Figure("2 GiB: restore", "GB/s", restored)
    yield Figure("2 GiB: files read", "GB/s", read)
    yield Figure("2 GiB: host to device", "GB/s", put)
    yield _quotient("2 GiB: restore / the slower of reading and putting", restored, min(read, put), 0.8)


def _median_of(work: Callable[[], object]) -> float:
    return statistics.median([seconds_of(work) for _ in range(1 + ROUNDS)][1:])


def _read_all(files: Sequence[Path]) -> None:
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(_read, files):
            pass


def _read(path: Path) -> None:
    buffer = host_bytes(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        at = 0
        while read := file.readinto(buffer[at:]):
            at += read


def lost(scale: Scale) -> Iterator[Figure]:
    rows = max(1, scale.nbytes(2) // 8 // 4096)
    loop = Loop(rows, 16384 if scale.full else max(64, round(2560 * min(1.0, 20 * scale.factor))), 3)
    steps = (loop.saves + 1) * SAVE_EVERY - 1
    quiet = 0.0
    for name, (_, package) in SAVERS.items():
        if not is_importable(package):
            print(f"{name}: skipped, {package} is not installed", file=sys.stderr)
            continue
        with fresh_directory(scale.directory) as directory:
            found = run_loop(name, loop, True, directory, False)
        if name == NOTHING:
            quiet = found["step_seconds"]
            yield Figure("loop: step", "seconds", quiet)
        seconds = (found["loop_seconds"] - steps * quiet) / loop.saves
        yield Figure(f"loop: lost per save of 2 GiB, {name}", "seconds", seconds)


def puts(scale: Scale) -> Iterator[Figure]:
    for case in measure_puts(argparse.Namespace(scale=scale.nbytes(1) / GIB, rounds=ROUNDS, dir=scale.directory)):
        for row in case.rows():
            yield Figure(row.what, "x", row.measured, most=row.most, detail=row.detail)


def resident(scale: Scale) -> Iterator[Figure]:
    leaf_bytes = whole_rows(scale.nbytes(1 / 16))
    growth = floor_growth(scale.transfer, leaf_bytes, 30, scale.directory)
    yield Figure("growth of the RSS floor over 30 saves of 256 MiB", "bytes", growth)


STEPS: dict[str, tuple[Callable[[Scale], Iterator[Figure]], float]] = {
    "transfers": (transfers, 50),
    "start_save": (start_saves, 90),
    "donation": (donation, 40),
    "host_copies": (host_copies, 20),
    "limit": (limit, 40),
    "peers": (peers, 80),
    "tests": (run_tests, 60),
    "lost": (lost, 60),
    "put_sharded": (puts, 25),
    "resident": (resident, 40),
}
"""Step -> what it does, and the most seconds that it may take. What matters most comes first."""


class Outcome(NamedTuple):
    step: str
    seconds: float
    figures: list[Figure]
    error: str


def run_step(name: str, options: argparse.Namespace, left_seconds: float) -> Outcome:
    """Run a step in a process of its own and group, so that all of it can be ended."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="jaxckpt-bench-", dir=options.dir) as directory:
        file, log = Path(directory) / "figures.json", Path(directory) / "log"
        command = [sys.executable, __file__, "--step", name, "--json", str(file), "--dir", directory]
        command += ["--scale", str(options.scale), *(["--cpu"] if options.cpu else [])]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment(name, cpu=options.cpu), stdout=output, stderr=output, start_new_session=True
            )
            error = _wait(process, min(STEPS[name][1], left_seconds))
        if error:
            said = log.read_text(errors="replace")
            print(said[-4000:], file=sys.stderr)
            error += "".join(f": {line}" for line in said.splitlines()[-1:])
        figures = [Figure(*one) for one in json.loads(file.read_text())] if file.exists() else []
    return Outcome(name, time.perf_counter() - began, figures, error)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """What went wrong, or nothing."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"took more than {seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"exit code {code}" if code else ""


def environment(step: str, *, cpu: bool) -> dict[str, str]:
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu" if cpu else "cuda,cpu",
    }
    return found | ({LIMIT: "1"} if step == "limit" else {})


def run_here(step: str, options: argparse.Namespace) -> None:
    """Run one step in this process; its figures so far are always in the file."""
    scale = Scale(not options.cpu, options.scale, options.dir)
    figures: list[Figure] = []
    for figure in STEPS[step][0](scale):
        figures.append(figure)
        options.json.write_text(json.dumps(figures))


def told(figure: Figure, value: float | None) -> str:
    match figure.unit:
        case "seconds" | "bytes":
            return show(f"_{figure.unit}", value)
        case "x":
            return show("ratio", value)
        case _:
            return "-" if value is None else f"{value:.3g} {figure.unit}".strip()


def target(figure: Figure) -> str:
    bounds = [("at least", figure.least), ("at most", figure.most)]
    if figure.least is not None and figure.least == figure.most:
        return told(figure, figure.least)
    return ", ".join(f"{word} {told(figure, value)}" for word, value in bounds if value is not None)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    print_table(
        "GPU check",
        ["figure", "target", "measured", "detail", "verdict"],
        [
            [f.what, target(f), told(f, f.value), f.detail, {None: "", True: "met", False: "MISSED"}[f.met]]
            for outcome in outcomes
            for f in outcome.figures
        ],
    )
    for outcome in outcomes:
        print(f"{outcome.step}: {outcome.seconds:.0f} s{', FAILED: ' + outcome.error if outcome.error else ''}")


def write(options: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    results: list[dict[str, Any]] = [
        {"step": outcome.step, **figure._asdict(), "met": figure.met}
        for outcome in outcomes
        for figure in outcome.figures
    ]
    results += [{"step": outcome.step, "took_seconds": outcome.seconds, "error": outcome.error} for outcome in outcomes]
    if options.cpu:
        note = f"no GPU was at hand: on the CPU, scaled by {options.scale}; the targets are those of a GPU"
        results.insert(0, {"note": note})
    ratios = {
        f.what: Ratio(f.value, "larger" if f.least else "smaller") for o in outcomes for f in o.figures if f.unit == "x"
    }
    write_json(options.json, "gpu_check", options.dir, results, ratios)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What jaxckpt does on one large GPU, each target beside its figure.")
    parser.add_argument("--cpu", action="store_true", help="on the CPU and scaled down, to try the script out")
    parser.add_argument("--scale", type=float, help="the fraction of the bytes (default: 1, with --cpu 0.01)")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="write here: a fast disk")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    parser.add_argument("--seconds", type=float, default=330.0, help="for all steps together (default: %(default)s)")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.scale = options.scale or (0.01 if options.cpu else 1.0)
    return options


def main() -> int:
    options = parse()
    use_cpu_devices(1)
    if options.step:
        run_here(options.step, options)
        return 0
    ends = time.perf_counter() + options.seconds
    jax.config.update("jax_platforms", "cpu" if options.cpu else None)
    if not options.cpu and jax.default_backend() != "gpu":
        print("JAX finds no GPU here; `--cpu` tries the script out", file=sys.stderr)
        return 2
    print_machine(options.dir)
    outcomes = []
    for name in options.only:
        print(f"{name} ...", file=sys.stderr)
        outcomes.append(run_step(name, options, max(0.0, ends - time.perf_counter())))
    print_outcomes(outcomes)
    if options.json:
        write(options, outcomes)
    missed = any(figure.met is False for outcome in outcomes for figure in outcome.figures)
    return 1 if any(outcome.error for outcome in outcomes) or (missed and not options.cpu) else 0


if __name__ == "__main__":
    sys.exit(main())
