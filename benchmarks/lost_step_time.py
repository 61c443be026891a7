"""What saving in the background takes from a training loop, beside Orbax and JAX; and what adapters on a frozen base
cost to save. Exit code 1 when a bar is missed.

    python benchmarks/lost_step_time.py [--quick] [--dir DIR] [--rounds N] [--json FILE]

The loop: 256 MiB of float32 in 8 arrays on one device, all of which each step changes and donates, as an optimizer
does, and a matmul that makes a step of 50 to 100 ms. Every fifth step is saved, each library keeping all that it saves.
A step ends when its arrays are ready and the call that saves has returned. Lost per save is the time of all steps
beyond as many median steps of the loop that saves nothing, divided by the number of saves; of that loop itself it tells
how much of the figure is noise. What is waited for after the last step is shown apart. jaxckpt makes data and
directories durable and hashes them; Orbax and JAX fsync array files only.

The adapters: 256 MiB of which 5 % changes, saved twice by a Checkpointer. Bytes are those of files on disk that are not
links to the first save's. `--scale` shrinks the state, to try the script out: the bars are meant for the full size.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    MIB,
    Figures,
    Samples,
    Worker,
    arguments,
    in_child,
    interleave,
    medians,
    print_machine,
    print_table,
    records,
    show,
    touch_free_memory,
    use_cpu_devices,
    write_json,
)
from acceptance import Row, verdict
from pinned_vs_baseline import WrongValuesError, _is_importable, _leaf_paths

import jaxckpt

Tree = dict[str, jax.Array]

LEAVES = 8
SAVE_EVERY = 5
QUIET_STEPS = 5
STATE_BYTES = 256 * MIB
CHANGING = 0.05


class Loop(NamedTuple):
    """A training loop.

    Args:
        leaf_rows: Rows of each of the 8 arrays; a row has 4 KiB.
        width: Of the square matrices that a step multiplies.
        saves: How many of its steps are saved, every fifth.
    """

    leaf_rows: int
    width: int
    saves: int


class Saver(Protocol):
    """How a library saves steps in the background."""

    def save(self, step: int, state: Tree) -> None:
        """Return as soon as the library lets the loop go on and donate `state`."""
        ...

    def wait(self) -> None:
        """Return when all is saved."""
        ...

    def restore(self, step: int, like: Tree) -> Tree: ...


class Nothing:
    def __init__(self, root: Path) -> None:
        pass

    def save(self, step: int, state: Tree) -> None:
        pass

    def wait(self) -> None:
        pass

    def restore(self, step: int, like: Tree) -> Tree:
        return like


class Jaxckpt:
    def __init__(self, root: Path) -> None:
        self._checkpointer = jaxckpt.Checkpointer(root)

    def save(self, step: int, state: Tree) -> None:
        self._checkpointer.save(step, state)

    def wait(self) -> None:
        self._checkpointer.wait()

    def restore(self, step: int, like: Tree) -> Tree:
        return self._checkpointer.restore(step, like=like)


class Orbax:
    def __init__(self, root: Path) -> None:
        import orbax.checkpoint as ocp

        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(root, options=options)

    def save(self, step: int, state: Tree) -> None:
        self._manager.save(step, args=self._args.StandardSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Tree) -> Tree:
        return self._manager.restore(step, args=self._args.StandardRestore(like))


class Jax:
    def __init__(self, root: Path) -> None:
        from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

        self._root = root
        self._manager = GlobalAsyncCheckpointManager()

    def save(self, step: int, state: Tree) -> None:
        self._manager.serialize_with_paths(list(state.values()), _leaf_paths(self._root / str(step), state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Tree) -> Tree:
        shardings = [array.sharding for array in like.values()]
        arrays = self._manager.deserialize_with_paths(shardings, _leaf_paths(self._root / str(step), like))
        return dict(zip(like, arrays, strict=True))


NOTHING, OURS = "no save", "jaxckpt"
SAVERS: dict[str, tuple[Callable[[Path], Saver], str]] = {
    NOTHING: (Nothing, "jax"),
    OURS: (Jaxckpt, "jax"),
    "orbax": (Orbax, "orbax.checkpoint"),
    "jax": (Jax, "tensorstore"),
}


def first_state(loop: Loop) -> Tree:
    keys = jax.random.split(jax.random.key(0), LEAVES)
    return {f"layer{n}": jax.random.normal(key, (loop.leaf_rows, 1024)) for n, key in enumerate(keys)}


@cache
def train_step() -> Callable[[Tree, jax.Array], Tree]:
    """Every element changes, by a number that a matmul gives; the old state is donated."""

    def step(state: Tree, matrix: jax.Array) -> Tree:
        gradient = jnp.tanh(matrix @ matrix).mean()
        return {name: 0.999 * array + gradient for name, array in state.items()}

    return jax.jit(step, donate_argnums=0)


def run_loop(name: str, loop: Loop, cold: bool, directory: Path, check: bool) -> Figures:
    """One turn: train, save every fifth step; with `check`, compare the last save with what was saved."""
    step_of = train_step()
    state, matrix = first_state(loop), jnp.ones((loop.width, loop.width)) / loop.width
    for _ in range(QUIET_STEPS):
        state = jax.block_until_ready(step_of(state, matrix))
    saver = SAVERS[name][0](directory / "run")
    touch_free_memory(0 if cold else 2 * _nbytes(state))
    last = loop.saves * SAVE_EVERY
    seconds, blocked, saved = [], [], {}
    for step in range(1, last + SAVE_EVERY):
        if check and step == last:
            saved = {key: np.array(array) for key, array in step_of(_copy(state), matrix).items()}
        began = time.perf_counter()
        state = jax.block_until_ready(step_of(state, matrix))
        trained = time.perf_counter()
        if step % SAVE_EVERY == 0:
            saver.save(step, state)
            blocked.append(time.perf_counter() - trained)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    saver.wait()
    finish = time.perf_counter() - began
    if check and name != NOTHING:
        check_saved(name, saver.restore(last, state), saved)
    return {
        "loop_seconds": sum(seconds),
        "step_seconds": statistics.median(seconds),
        "blocked_seconds": statistics.median(blocked),
        "finish_seconds": finish,
    }


def _copy(state: Tree) -> Tree:
    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def _nbytes(state: Mapping[str, Any]) -> int:
    return sum(array.nbytes for array in state.values())


def check_saved(name: str, restored: Tree, saved: dict[str, np.ndarray]) -> None:
    for key, array in saved.items():
        if not np.array_equal(np.asarray(restored[key]), array):
            raise WrongValuesError(f"{name}, {key}: restored other values than the loop had when it saved them")


def measure_loop(options: argparse.Namespace) -> Samples:
    """The loop with each library, in a process of its own, and what a save takes from it."""
    loop = Loop(max(1, round(STATE_BYTES * options.scale / LEAVES / 4096)), round(2560 * min(1, options.scale * 4)), 5)
    present = [name for name, (_, package) in SAVERS.items() if _is_importable(package)]
    for name in SAVERS.keys() - set(present):
        print(f"{name}: skipped, {SAVERS[name][1]} is not installed", file=sys.stderr)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker()) for name in present}
        turns = {name: partial(workers[name].call, run_loop, name, loop, options.cold) for name in present}
        samples = interleave(turns, options.rounds, options.dir, "loop")
    quiet = statistics.median(samples[NOTHING]["step_seconds"])
    steps = (loop.saves + 1) * SAVE_EVERY - 1
    for figures in samples.values():
        figures["lost_seconds"] = [(seconds - steps * quiet) / loop.saves for seconds in figures["loop_seconds"]]
    return samples


def loop_rows(found: dict[str, Figures]) -> list[Row]:
    lost = {name: figures["lost_seconds"] for name, figures in found.items()}
    peers = {name: seconds for name, seconds in lost.items() if name not in (NOTHING, OURS)}
    rows = [Row("loop", f"lost per save: {name}", "lost_seconds", seconds) for name, seconds in lost.items()]
    if peers:
        better = min(peers, key=peers.__getitem__)
        if abs(lost[NOTHING]) > 0.25 * peers[better]:
            print("note: the loop that saves nothing varies too much for its median to say what a save costs")
        detail = f"{show('_seconds', lost[OURS])} / {show('_seconds', peers[better])}"
        ratio = max(0.0, lost[OURS]) / max(1e-9, peers[better])
        rows.append(Row("loop", f"lost per save: jaxckpt / {better}, the better peer", "ratio", ratio, 0.5, detail))
    return rows


def measure_adapters(options: argparse.Namespace) -> Samples:
    return in_child(adapter_samples, options.scale, options.cold, options.rounds, options.dir)


def adapter_samples(scale: float, cold: bool, rounds: int, parent: Path) -> Samples:
    """Save a frozen base with adapters, change these, and save again."""
    rows = max(20, round(STATE_BYTES * scale / LEAVES / 4096))

    def turn(directory: Path, check: bool) -> Figures:
        base = first_state(Loop(round(rows * (1 - CHANGING)), 0, 0))
        touch_free_memory(0 if cold else 2 * _nbytes(base))
        seconds = []
        with jaxckpt.Checkpointer(directory / "run") as ckpt:
            for step in range(2):
                adapters = {f"adapter{n}": jnp.full((round(rows * CHANGING), 1024), step + n) for n in range(LEAVES)}
                state = jax.block_until_ready({"base": base, "adapters": adapters})
                began = time.perf_counter()
                pending = ckpt.save(step, state)
                assert pending is not None
                pending.result()
                seconds.append(time.perf_counter() - began)
            if check:
                check_saved(
                    "adapters", ckpt.restore(1)["base"], {name: np.asarray(leaf) for name, leaf in base.items()}
                )
        first, second = (new_bytes(directory / "run" / str(step)) for step in range(2))
        return {
            "first_seconds": seconds[0],
            "second_seconds": seconds[1],
            "first_bytes": first + linked_bytes(directory / "run" / "1"),
            "second_bytes": second,
        }

    return interleave({"adapters": turn}, rounds, parent, "adapters")


def new_bytes(checkpoint: Path) -> int:
    """Bytes of the files that no other checkpoint has."""
    return _bytes_of_files(checkpoint, lambda links: links == 1)


def linked_bytes(checkpoint: Path) -> int:
    return _bytes_of_files(checkpoint, lambda links: links > 1)


def _bytes_of_files(checkpoint: Path, wanted: Callable[[int], bool]) -> int:
    found = [file.stat() for file in checkpoint.rglob("*") if file.is_file()]
    return sum(status.st_size for status in found if wanted(status.st_nlink))


def adapter_rows(figures: Figures) -> list[Row]:
    return [
        Row(
            "adapters",
            f"5 % changes: {unit} of the second save / of the first",
            "ratio",
            figures[f"second_{unit}"] / figures[f"first_{unit}"],
            most,
            f"{show(f'_{unit}', figures[f'second_{unit}'])} / {show(f'_{unit}', figures[f'first_{unit}'])}",
        )
        for unit, most in (("bytes", 0.06), ("seconds", 0.15))
    ]


def main() -> int:
    parser = arguments("What saving in the background takes from a training loop.")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the state, to try the script out")
    parser.add_argument("--quick", action="store_true", help="a quarter of the state, 2 rounds")
    options = parser.parse_args()
    options.scale *= 0.25 if options.quick else 1.0
    options.rounds = options.rounds or (2 if options.quick else 5)
    use_cpu_devices(1)
    print_machine(options.dir)
    if options.scale != 1:
        print(f"note: the state is scaled by {options.scale}; the bars are meant for the full size")
    loops, adapters = measure_loop(options), measure_adapters(options)
    print_loop(medians(loops))
    rows = [*loop_rows(medians(loops)), *adapter_rows(medians(adapters)["adapters"])]
    print_table(
        f"lost step time and adapters, medians of {options.rounds} rounds",
        ["figure", "bar, at most", "measured", "detail", "verdict"],
        [
            [row.what, show(row.figure, row.most), show(row.figure, row.measured), row.detail, verdict(row)]
            for row in rows
        ],
    )
    if options.json:
        results = [*records("loop", loops), *records("adapters", adapters)]
        results += [asdict(row) | {"passed": row.passed} for row in rows]
        write_json(options.json, "lost_step_time", options.dir, results)
    return 0 if all(row.passed for row in rows) else 1


def print_loop(found: dict[str, Figures]) -> None:
    columns = ("step_seconds", "blocked_seconds", "loop_seconds", "finish_seconds", "lost_seconds")
    heading = ("median step", "save returns", "whole loop", "wait at the end", "lost per save")
    cells = [[name, *(show(column, figures[column]) for column in columns)] for name, figures in found.items()]
    print_table("the loop, medians", ["variant", *heading], cells)


if __name__ == "__main__":
    sys.exit(main())
