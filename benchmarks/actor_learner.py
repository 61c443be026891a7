"""What a learner's transfers and saves take from an actor that runs in another thread, on another device.

    python benchmarks/actor_learner.py [--quick] [--dir DIR] [--rounds N] [--json FILE] [--plot FILE]

The question is why a transfer between devices blocks the computation of another thread. The actor, on the first
device, takes steps of 8 small dispatches each and waits for the last. Meanwhile the learner, a thread with the second
device, does one thing over and over, a cycle in the table: it fetches a rollout of 384 small arrays from the actor's
device, one by one or in one batched `device_put`; or it saves its state with jaxckpt, in each transfer mode, from a
state that is new each time. The figures are the mean, the 50th and 99th percentile and the maximum of the actor's step
times, and their ratios to those of the actor alone in the same round.

The bar: a save adds at most 10 % to the actor's 50th percentile where there are cores to spare, which is where the
cores that this process may use were idle for at least one core's worth of the time on average, as /proc/stat tells.
Where there are none, the ratio is shown without a verdict: the threads then take turns, which few of the short steps
notice, but their mean does. Each case runs in a process of its own that may use so many cores: all of them, and one,
which is none to spare (`--cores`).

Exit code 1 when the bar is missed, or when what was transferred or restored has other bytes than it had.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    MIB,
    Figures,
    Samples,
    Turn,
    arguments,
    in_child,
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
from pinned_vs_baseline import WrongValuesError

import jaxckpt

Mode = Literal["direct", "pinned", "staged"]
Tree = dict[str, jax.Array]

ALONE, EACH, BATCHED = "alone", "384 transfers", "1 batched transfer"
SAVES: dict[str, Mode] = {f"save, {mode}": mode for mode in get_args(Mode)}
DISPATCHES = 8
ROLLOUT = 384
LEAVES = 8
STATE_BYTES = 256 * MIB
MOST = 1.1
SPARE_CORES = 1.0
PARTS = ("mean", "p50", "p99", "max")


class Load(NamedTuple):
    """How much is done.

    Args:
        seconds: How long the actor takes steps in each turn.
        state_bytes: Of what the learner saves.
    """

    seconds: float
    state_bytes: int


class Learner(Protocol):
    """What the learner does, and whether that was right."""

    def cycle(self) -> None: ...

    def check(self) -> None: ...


class Idle:
    def cycle(self) -> None:
        time.sleep(0.01)

    def check(self) -> None:
        pass


class Fetch:
    """Brings the rollout from the actor's device and makes an update of it."""

    def __init__(self, put: Callable[[list[jax.Array], jax.Device], list[jax.Array]]) -> None:
        keys = jax.random.split(jax.device_put(jax.random.key(0), actor_device()), ROLLOUT)
        self._rollout = jax.block_until_ready([jax.random.normal(key, (16, 16)) for key in keys])
        self._put = put
        self._update = jax.jit(lambda arrays: sum(array.sum() for array in arrays))
        self.cycle()

    def cycle(self) -> None:
        self._moved = self._put(self._rollout, learner_device())
        jax.block_until_ready(self._update(self._moved))

    def check(self) -> None:
        for number, (moved, array) in enumerate(zip(self._moved, self._rollout, strict=True)):
            if moved.devices() != {learner_device()} or np.asarray(moved).tobytes() != np.asarray(array).tobytes():
                raise WrongValuesError(f"array {number} of the rollout: transferred other bytes, or elsewhere")


def put_each(arrays: list[jax.Array], device: jax.Device) -> list[jax.Array]:
    return [jax.device_put(array, device) for array in arrays]


class Save:
    """Makes a new state, as an update does, and saves it over the last one."""

    def __init__(self, mode: Mode, nbytes: int, directory: Path) -> None:
        rows = max(1, nbytes // LEAVES // 4096)
        zeros = {f"layer{number}": np.zeros((rows, 1024), np.float32) for number in range(LEAVES)}
        self._state = jax.device_put(zeros, learner_device())
        self._advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
        self._options, self._path = jaxckpt.SaveOptions(transfer=mode), directory / "checkpoint"
        self.cycle()

    def cycle(self) -> None:
        self._state = jax.block_until_ready(self._advance(self._state))
        jaxckpt.save(self._path, self._state, overwrite=True, options=self._options)

    def check(self) -> None:
        for name, leaf in jaxckpt.restore(self._path).items():
            if np.asarray(leaf).tobytes() != np.asarray(self._state[name]).tobytes():
                raise WrongValuesError(f"{self._options.transfer}, {name}: restored other bytes than were saved")


def actor_device() -> jax.Device:
    return jax.devices()[0]


def learner_device() -> jax.Device:
    """The second one; a machine with one accelerator has the actor's."""
    return jax.devices()[min(1, jax.device_count() - 1)]


def learners(load: Load) -> dict[str, Callable[[Path], Learner]]:
    """By name, what makes each learner, given a directory."""
    found: dict[str, Callable[[Path], Learner]] = {ALONE: lambda _: Idle()}
    if jax.device_count() > 1:
        found |= {EACH: lambda _: Fetch(put_each), BATCHED: lambda _: Fetch(jax.device_put)}
    else:
        print("transfers: skipped, there is one device, which actor and learner share", file=sys.stderr)
    return found | {name: partial(Save, mode, load.state_bytes) for name, mode in SAVES.items()}


def act(seconds: float, learned: threading.Event) -> np.ndarray:
    """Take steps for so long, and until the learner has finished something; returns how long each took."""
    policy = jax.jit(lambda weights, observation: jnp.tanh(observation @ weights))
    weights, observation = jax.device_put((np.eye(64, dtype=np.float32), np.ones((8, 64), np.float32)), actor_device())
    policy(weights, observation).block_until_ready()
    found = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end or not learned.is_set():
        for _ in range(DISPATCHES):
            observation = policy(weights, observation)
        observation.block_until_ready()
        found.append(time.perf_counter() - began)
    return np.array(found)


def learn(learner: Learner, learned: threading.Event, stop: threading.Event) -> list[float]:
    """Go on until stopped; returns how long each cycle took."""
    found = []
    try:
        while not (stop.is_set() and found):
            began = time.perf_counter()
            learner.cycle()
            found.append(time.perf_counter() - began)
            learned.set()
    finally:
        learned.set()
    return found


def run_both(make: Callable[[Path], Learner], load: Load, directory: Path, check: bool) -> Figures:
    """One turn: actor and learner in threads of their own."""
    learner, learned, stop = make(directory), threading.Event(), threading.Event()
    used, idle, began = time.process_time(), idle_seconds(), time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        learning = pool.submit(learn, learner, learned, stop)
        try:
            steps = pool.submit(act, load.seconds, learned).result()
        finally:
            wall, used, idle = time.perf_counter() - began, time.process_time() - used, idle_seconds() - idle
            stop.set()
    cycles = learning.result()
    if check:
        learner.check()
    p50, p99 = np.percentile(steps, (50, 99))
    return {
        "mean_seconds": float(steps.mean()),
        "p50_seconds": float(p50),
        "p99_seconds": float(p99),
        "max_seconds": float(steps.max()),
        "cycle_seconds": statistics.median(cycles),
        "steps": len(steps),
        "busy_cores": used / wall,
        "idle_cores": idle / wall,
    }


def idle_seconds() -> float:
    """How long the cores that this process may use have had nothing to do, or only to wait for a disk."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    fields = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    ticks = sum(int(idle) + int(waiting) for name, _, _, _, idle, waiting, *_ in fields if name in names)
    return ticks / os.sysconf("SC_CLK_TCK")


def case_samples(cores: int, load: Load, rounds: int, parent: Path) -> Samples:
    """All learners in turns, in a process that may use so many cores: call it before JAX's first use there."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    turns: dict[str, Turn] = {name: partial(run_both, make, load) for name, make in learners(load).items()}
    samples = interleave(turns, rounds, parent, case_name(cores))
    for figures in samples.values():
        for part in PARTS:
            pairs = zip(figures[f"{part}_seconds"], samples[ALONE][f"{part}_seconds"], strict=True)
            figures[f"{part}_to_alone_ratio"] = [seconds / alone for seconds, alone in pairs]
    return samples


def case_name(cores: int) -> str:
    return f"{cores} core{'s' if cores > 1 else ''}"


def case_rows(case: str, samples: Samples) -> list[Row]:
    """What a save adds to the actor's median step, and whether the bar holds for it."""
    found = medians(samples)
    return [
        Row(
            case,
            f"{case}: p50 during {name} / alone",
            "p50_ratio",
            found[name]["p50_to_alone_ratio"],
            MOST if found[name]["idle_cores"] >= SPARE_CORES else None,
            cores_detail(found[name]),
        )
        for name in SAVES
    ]


def cores_detail(figures: Figures) -> str:
    spare = "cores to spare" if figures["idle_cores"] >= SPARE_CORES else "none to spare"
    return f"{spare}: {figures['busy_cores']:.1f} used by this process, {figures['idle_cores']:.1f} idle"


def print_case(case: str, samples: Samples) -> None:
    print_table(
        f"the actor's steps, {case}; medians",
        ["learner", *PARTS, *(f"{part} / alone" for part in PARTS), "a cycle", "cores used", "cores idle"],
        [
            [
                name,
                *(f"{figures[f'{part}_seconds'] * 1e6:,.0f} us" for part in PARTS),
                *(show("ratio", figures[f"{part}_to_alone_ratio"]) for part in PARTS),
                show("_seconds", figures["cycle_seconds"]) if name != ALONE else "-",
                f"{figures['busy_cores']:.1f}",
                f"{figures['idle_cores']:.1f}",
            ]
            for name, figures in medians(samples).items()
        ],
    )


def print_rows(rows: list[Row]) -> None:
    print_table(
        "what a save adds to the actor's median step",
        ["figure", "bar, at most", "measured", "cores on average", "verdict"],
        [[row.what, show("ratio", row.most), show("ratio", row.measured), row.detail, verdict(row)] for row in rows],
    )
    if any(row.most is None for row in rows):
        print("no verdict without cores to spare: there the actor waits for a core, whatever the save does")


def bars(case: str, samples: Samples, axes: Any) -> None:
    found = medians(samples)
    for number, part in enumerate(PARTS):
        values = [1e6 * figures[f"{part}_seconds"] for figures in found.values()]
        axes.bar(np.arange(len(values)) + 0.2 * (number - 1.5), values, 0.2, label=part)
    axes.set_xticks(range(len(found)), [*found], rotation=30, ha="right")
    axes.set(yscale="log", ylabel="us a step", title=f"the actor, {case}")
    axes.legend()


def parse() -> argparse.Namespace:
    parser = arguments("An actor's step times while a learner in another thread transfers and saves.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the state, 1 s a turn, 2 rounds")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink state and seconds, to try the script out")
    parser.add_argument("--cores", type=int, nargs="+", metavar="N", help="cases (default: all that there are, and 1)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw here, when matplotlib is installed")
    options = parser.parse_args()
    available = len(os.sched_getaffinity(0))
    options.scale *= 0.25 if options.quick else 1.0
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.cores = options.cores or [available, *([1] if available > 1 else [])]
    if max(options.cores) > available:
        parser.error(f"--cores {max(options.cores)}: this process may use {available} of {os.cpu_count()}")
    return options


def main() -> int:
    options = parse()
    use_cpu_devices(2)
    print_machine(options.dir)
    print(f"of {os.cpu_count()} cores this process may use {len(os.sched_getaffinity(0))}")
    load = Load(4 * options.scale, round(STATE_BYTES * options.scale))
    results = {
        case_name(cores): in_child(case_samples, cores, load, options.rounds, options.dir) for cores in options.cores
    }
    rows = [row for case, samples in results.items() for row in case_rows(case, samples)]
    for case, samples in results.items():
        print_case(case, samples)
    print_rows(rows)
    if options.json:
        found = [record for case, samples in results.items() for record in records(case, samples)]
        found += [asdict(row) | {"passed": row.passed} for row in rows]
        write_json(options.json, "actor_learner", options.dir, found)
    if options.plot:
        plot(options.plot, [partial(bars, case, samples) for case, samples in results.items()])
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
