"""Why a batch of adaptive solves is slower on a sharded array than under pmap; and what is saved of each form.

    python benchmarks/sharding_vs_pmap.py [--quick] [--dir DIR] [--rounds N] [--json FILE] [--plot FILE]

The question is that of https://github.com/patrick-kidger/diffrax/issues/407 and
https://github.com/jax-ml/jax/issues/20968. A solve has two nested loops that end when the data say so: steps of an
adaptive implicit method, and Newton's iterations in each. A batch of them, each element as stiff as it likes, runs as
`jit(vmap)` on a sharded batch, as `pmap` and as `shard_map` of the local `vmap`, and on one device. Where Diffrax is
installed the same equation is also solved by it.

`vmap` turns the predicate of a loop into "any element of the batch is unfinished". The compiled program tells what
that becomes: how many collectives are inside of its loops, and how many of those reduce a predicate. From that the gap
is explained in two sentences.

Then the state of each form is saved and restored into every other one. Exit code 1 when one byte differs, when a form
continues from what another saved otherwise than from its own state, or when the forms' results differ.

pmap is the one of the JAX that is installed: a form of jit and shard_map since 0.8.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    Figures,
    Samples,
    Turn,
    arguments,
    fresh_directory,
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
from _hlo import Collectives, collectives
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from pinned_vs_baseline import WrongValuesError

import jaxckpt

State = dict[str, Any]
Solve = Callable[[State], State]

ONE, SHARDED, PMAP, SHARD_MAP = "vmap on one device", "jit(vmap), sharded", "pmap(vmap)", "shard_map(vmap)"
DIMENSION = 4
SPAN = 4.0
ERROR = 1e-3
CALLS = 5


def derivative(t: jax.Array, y: jax.Array, rate: jax.Array) -> jax.Array:
    return -rate * (y + jnp.tanh(3 * y) - jnp.cos(t))


def solve(state: State) -> State:
    """Go on for `SPAN` with one element of the batch: trapezoidal steps, as long as the error allows."""
    end, rate = state["t"] + SPAN, state["rate"]

    def unfinished(state: State) -> jax.Array:
        return state["t"] < end

    def advance(state: State) -> State:
        left = end - state["t"]
        length = jnp.minimum(state["length"], left)
        new, iterations = implicit_step(state["t"], state["y"], length, rate)
        change = derivative(state["t"] + length, new, rate) - derivative(state["t"], state["y"], rate)
        error = jnp.max(jnp.abs(change)) * length / 2
        taken = error <= ERROR
        arrived = jnp.where(length == left, end, state["t"] + length)
        return {
            "t": jnp.where(taken, arrived, state["t"]),
            "y": jnp.where(taken, new, state["y"]),
            "length": length * jnp.clip(0.9 * jnp.sqrt(ERROR / jnp.maximum(error, 1e-12)), 0.2, 5.0),
            "rate": rate,
            "steps": state["steps"] + 1,
            "iterations": state["iterations"] + iterations,
        }

    return jax.lax.while_loop(unfinished, advance, state)


def implicit_step(t: jax.Array, y: jax.Array, length: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The end of a trapezoidal step, by Newton's method, and how many iterations that took."""
    slope = derivative(t, y, rate)

    def residual(new: jax.Array) -> jax.Array:
        return new - y - length / 2 * (slope + derivative(t + length, new, rate))

    def unfinished(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        _, change, count = carry
        return (jnp.max(jnp.abs(change)) > 1e-5) & (count < 20)

    def improve(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        new, _, count = carry
        value, gradient = jax.jvp(residual, (new,), (jnp.ones_like(new),))
        return new - value / gradient, value / gradient, count + 1

    new, _, count = jax.lax.while_loop(unfinished, improve, (y, jnp.full_like(y, jnp.inf), jnp.int32(0)))
    return new, count


def solve_diffrax(state: State) -> State:
    """The same equation by Diffrax.

    An explicit method: Lineax, which the implicit ones need, does not run inside of shard_map yet
    (https://github.com/patrick-kidger/lineax/issues/185).
    """
    import diffrax

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(derivative),
        diffrax.Tsit5(),
        state["t"],
        state["t"] + SPAN,
        1e-3,
        state["y"],
        state["rate"],
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
    )
    return state | {
        "t": state["t"] + SPAN,
        "y": solution.ys[-1],
        "steps": state["steps"] + solution.stats["num_steps"].astype(jnp.int32),
    }


def first_state(batch: int) -> State:
    """The whole batch on the host. Stiffness grows along it, so that some devices get more to do than others."""
    random = np.random.default_rng(0)
    return {
        "t": np.zeros(batch, np.float32),
        "y": random.uniform(0, 1.5, (batch, DIMENSION)).astype(np.float32),
        "length": np.full(batch, 0.01, np.float32),
        "rate": np.geomspace(0.5, 50, batch, dtype=np.float32),
        "steps": np.zeros(batch, np.int32),
        "iterations": np.zeros(batch, np.int32),
    }


class Form(NamedTuple):
    """One way to run a batch of solves.

    Args:
        run: State -> state, compiled.
        sharding: Of every array of the state.
        split: Whether the first axis counts the devices and the second a device's share, as pmap wants it.
    """

    run: Any
    sharding: Sharding
    split: bool = False

    def place(self, state: State) -> State:
        """A state in whatever shape and place, as this form takes it."""
        batch = state["t"].size
        lead = (jax.device_count(), batch // jax.device_count()) if self.split else (batch,)
        shaped = {name: leaf.reshape(*lead, *([DIMENSION] if name == "y" else [])) for name, leaf in state.items()}
        return jax.block_until_ready(jax.device_put(shaped, self.sharding))

    def count(self, state: State) -> Collectives:
        return collectives(self.run.lower(self.place(state)).compile().as_text())


def forms(one: Solve) -> dict[str, Form]:
    """Every form that this JAX has, of a solve of one element."""
    mesh, spec, local = Mesh(np.array(jax.devices()), ("batch",)), PartitionSpec("batch"), jax.vmap(one)
    # check_vma would want every constant in the carry of a loop, also those of a library, marked as varying.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = {
        ONE: Form(jax.jit(local), SingleDeviceSharding(jax.devices()[0])),
        SHARDED: Form(jax.jit(local), NamedSharding(mesh, spec)),
        SHARD_MAP: Form(jax.jit(mapped), NamedSharding(mesh, spec)),
    }
    # It is in maintenance mode since JAX 0.8 and may go.
    pmap = getattr(jax, "pmap", None)
    if pmap is None:
        print(f"{PMAP}: skipped, this JAX has none", file=sys.stderr)
        return found
    return found | {PMAP: Form(pmap(local), NamedSharding(mesh, spec), split=True)}


def time_form(form: Form, state: State, directory: Path, check: bool) -> Figures:
    """One turn; the first one compiles."""
    placed, seconds = form.place(state), []
    for _ in range(CALLS):
        began = time.perf_counter()
        jax.block_until_ready(form.run(placed))
        seconds.append(time.perf_counter() - began)
    return {"solve_seconds": statistics.median(seconds)}


def measure(case: str, found: Mapping[str, Form], state: State, options: argparse.Namespace) -> Samples:
    turns: dict[str, Turn] = {name: partial(time_form, form, state) for name, form in found.items()}
    samples = interleave(turns, options.rounds, options.dir, case)
    local = samples[SHARD_MAP]["solve_seconds"]
    for name, form in found.items():
        pairs = zip(samples[name]["solve_seconds"], local, strict=True)
        samples[name]["solve_to_shard_map_ratio"] = [seconds / other for seconds, other in pairs]
        counted = form.count(state)
        samples[name]["collectives_in_loops"] = [counted.in_loops]
        samples[name]["predicate_reductions_in_loops"] = [counted.of_predicates]
    return samples


def check_forms(case: str, found: Mapping[str, Form], state: State, tolerance: float, directory: Path) -> int:
    """Save the state of each form, restore it into all, go on from there; returns how many pairs that were.

    Raises:
        WrongValuesError: A byte differs, or a result by more than `tolerance` of the largest value.
    """
    ends = {name: form.run(form.place(state)) for name, form in found.items()}
    for saver, end in ends.items():
        check_close(f"{case}: {saver} beside {SHARD_MAP}", end["y"], ends[SHARD_MAP]["y"], tolerance)
        path = directory / str([*ends].index(saver))
        jaxckpt.save(path, end)
        expected = found[saver].run(end)["y"]
        for restorer, form in found.items():
            what = f"{case}: {saver} into {restorer}"
            like = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=form.sharding) for name, leaf in end.items()
            }
            placed = form.place(jaxckpt.restore(path, like))
            check_bytes(what, placed, end)
            check_close(what, form.run(placed)["y"], expected, tolerance)
    return len(found) ** 2


def check_bytes(what: str, restored: State, saved: State) -> None:
    for name, leaf in saved.items():
        if np.asarray(restored[name]).tobytes() != np.asarray(leaf).tobytes():
            raise WrongValuesError(f"{what}, {name}: restored other bytes than were saved")


def check_close(what: str, found: jax.Array, expected: jax.Array, tolerance: float) -> None:
    left, right = (np.asarray(array).reshape(-1, DIMENSION) for array in (found, expected))
    difference = np.max(np.abs(left - right)) / np.max(np.abs(right))
    if not difference <= tolerance:
        raise WrongValuesError(f"{what}: the results differ by {difference:.2g}; expected at most {tolerance:.2g}")


def explain(samples: Samples, end: State) -> str:
    """The gap in two sentences, from what was counted and timed."""
    found = medians(samples)
    sharded, local = found[SHARDED], found[SHARD_MAP]
    places, times = sharded["predicate_reductions_in_loops"], int(np.max(end["steps"]) + np.max(end["iterations"]))
    first = (
        f"{SHARDED} reduces the predicate of a loop across all devices in {places:.0f} places of the compiled program, "
        f"at least {times:,} times a solve, because one loop runs until the last element of the whole batch is done."
    )
    if not places:
        first = f"{SHARDED} reduces no predicate of a loop across devices, so that its loops wait for nobody."
    free = [name for name in (PMAP, SHARD_MAP) if name in found and not found[name]["predicate_reductions_in_loops"]]
    second = (
        f"With {' and '.join(free) or 'no form'} there is no such reduction and each device loops until its share is "
        f"done: {show('_seconds', local['solve_seconds'])} a solve with {SHARD_MAP} and "
        f"{show('_seconds', sharded['solve_seconds'])} with {SHARDED}, "
        f"{show('ratio', sharded['solve_to_shard_map_ratio'])}."
    )
    return f"{first} {second}"


def print_case(case: str, samples: Samples, text: str) -> None:
    columns = ("solve_seconds", "solve_to_shard_map_ratio")
    print_table(
        f"{case}; medians",
        ["form", "solve", "/ shard_map", "collectives in loops", "of them reduce a predicate"],
        [
            [
                name,
                *(show(column, figures[column]) for column in columns),
                f"{figures['collectives_in_loops']:.0f}",
                f"{figures['predicate_reductions_in_loops']:.0f}",
            ]
            for name, figures in medians(samples).items()
        ],
    )
    print(text)


def bars(case: str, samples: Samples, axes: Any) -> None:
    found = medians(samples)
    axes.bar([*found], [figures["solve_seconds"] for figures in found.values()])
    axes.tick_params(axis="x", rotation=20)
    axes.set(yscale="log", ylabel="seconds a solve", title=case)


def parse() -> argparse.Namespace:
    parser = arguments("Batched adaptive solves: a sharded batch beside pmap and shard_map.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the batch, 2 rounds")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the batch, to try the script out")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="by how much results may differ (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw here, when matplotlib is installed")
    options = parser.parse_args()
    options.scale *= 0.25 if options.quick else 1.0
    options.rounds = options.rounds or (2 if options.quick else 5)
    return options


def main() -> None:
    options = parse()
    use_cpu_devices(8)
    print_machine(options.dir)
    state = first_state(jax.device_count() * max(1, round(128 * options.scale)))
    solves: dict[str, Solve] = {"nested loops": solve}
    if importlib.util.find_spec("diffrax"):
        solves["Diffrax"] = solve_diffrax
    else:
        print("Diffrax: skipped, it is not installed", file=sys.stderr)
    results, drawn = [], {}
    for case, one in solves.items():
        found = forms(one)
        drawn[case] = measure(case, found, state, options)
        text = explain(drawn[case], found[SHARD_MAP].run(found[SHARD_MAP].place(state)))
        print_case(case, drawn[case], text)
        with fresh_directory(options.dir) as directory:
            pairs = check_forms(case, found, state, options.tolerance, directory)
        print(f"saved by each form, restored into each: all bytes equal, {pairs} pairs of {len(found)} forms")
        results += [*records(case, drawn[case]), {"case": case, "explanation": text, "equal_pairs": pairs}]
    if options.json:
        write_json(options.json, "sharding_vs_pmap", options.dir, results)
    if options.plot:
        plot(options.plot, [partial(bars, case, samples) for case, samples in drawn.items()])


if __name__ == "__main__":
    main()
