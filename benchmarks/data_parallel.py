"""A transformer trained data-parallel through `jit` with shardings and through `shard_map`; and what saving it takes.

    python benchmarks/data_parallel.py [--quick] [--dir DIR] [--rounds N] [--json FILE] [--plot FILE]

The question is that of https://github.com/jax-ml/jax/issues/19657. Both forms train the same small transformer with
Adam from the same seed on the same batches, parameters replicated over all devices, the batch sharded: `jit` leaves it
to the compiler where gradients are summed, `shard_map` says so with `pmean`. Each trains alone and while a Checkpointer
saves every fifth step. Lost per save is the time of all steps beyond as many median steps of the same form without
saves, divided by the number of saves.

Exit code 1 when the losses of the forms differ by more than the tolerance, when a checkpoint of one form does not give
the other the bytes that were saved and the same next loss, and when a checkpoint of the replicated state has more bytes
than the state and its padding. The last is also checked of the same state over several processes with a device each
(`--processes`), where none may write more than its share: what is replicated is written once, split over the replicas.
Those run on CPUs, whatever else the machine has.
"""

import argparse
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    Figures,
    Samples,
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
from _hlo import collectives
from acceptance import Row, verdict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pinned_vs_baseline import WrongValuesError

import jaxckpt

Tree = dict[str, Any]
Step = Callable[[Tree, jax.Array], tuple[Tree, jax.Array]]

JIT, SHARD_MAP = "jit", "shard_map"
SAVING = ", saving"
SAVE_EVERY = 5
HEADS = 4
TOKENS = 4096
LENGTH = 32
RATE = 1e-3
PACK_ALIGNMENT = 64
"""Bytes: in a file that several leaves share, each starts at a multiple of this."""


class Model(NamedTuple):
    """A transformer and its training.

    Args:
        width: Of an embedding, a multiple of 4.
        layers: How many blocks.
        sequences: Of 32 tokens, on each device in each step.
        saves: How many of the steps are saved, every fifth.
    """

    width: int
    layers: int
    sequences: int
    saves: int

    @property
    def steps(self) -> int:
        """One period longer than to the last save, so that its write falls into the loop."""
        return (self.saves + 1) * SAVE_EVERY - 1


def first_state(model: Model) -> Tree:
    """Parameters and the moments of Adam, on the host."""
    random, width = np.random.default_rng(0), model.width

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / math.sqrt(rows)).astype(np.float32)

    parameters = {
        "embedding": matrix(TOKENS, width),
        "position": matrix(LENGTH, width),
        "blocks": [
            {
                "attention_scale": np.ones(width, np.float32),
                "attention_in": matrix(width, 3 * width),
                "attention_out": matrix(width, width),
                "dense_scale": np.ones(width, np.float32),
                "dense_in": matrix(width, 4 * width),
                "dense_out": matrix(4 * width, width),
            }
            for _ in range(model.layers)
        ],
    }
    zeros = jax.tree.map(np.zeros_like, parameters)
    return {"parameters": parameters, "mean": zeros, "square": zeros, "step": np.zeros((), np.int32)}


def loss_of(parameters: Tree, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next token."""
    found = parameters["embedding"][tokens[:, :-1]] + parameters["position"][: tokens.shape[1] - 1]
    for block in parameters["blocks"]:
        found += attention(block, normalized(found) * block["attention_scale"])
        found += jax.nn.gelu(normalized(found) * block["dense_scale"] @ block["dense_in"]) @ block["dense_out"]
    scores = jax.nn.log_softmax(normalized(found) @ parameters["embedding"].T)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()


def normalized(values: jax.Array) -> jax.Array:
    return values * jax.lax.rsqrt(jnp.mean(values**2, axis=-1, keepdims=True) + 1e-6)


def attention(block: Tree, values: jax.Array) -> jax.Array:
    batch, length, width = values.shape
    split = (values @ block["attention_in"]).reshape(batch, length, 3, HEADS, width // HEADS)
    mixed = jax.nn.dot_product_attention(*jnp.moveaxis(split, 2, 0), is_causal=True)
    return mixed.reshape(values.shape) @ block["attention_out"]


def adam(state: Tree, gradient: Tree) -> Tree:
    step = state["step"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, state["square"], gradient)
    # A large epsilon: where a gradient is next to nothing, its sign is noise that the forms do not share.
    parameters = jax.tree.map(
        lambda p, m, s: p - RATE * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.99**step)) + 1e-4),
        state["parameters"],
        mean,
        square,
    )
    return {"parameters": parameters, "mean": mean, "square": square, "step": step}


def train(state: Tree, tokens: jax.Array, axis: str | None = None) -> tuple[Tree, jax.Array]:
    """One step; of one device's share of the batch where `axis` is that of all shares."""
    loss, gradient = jax.value_and_grad(loss_of)(state["parameters"], tokens)
    if axis is not None:
        loss, gradient = jax.lax.pmean((loss, gradient), axis)
    return adam(state, gradient), loss


@cache
def shardings() -> tuple[NamedSharding, NamedSharding]:
    """Of the state, which every device holds whole, and of a batch."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))


@cache
def forms() -> dict[str, Any]:
    """The training step, both ways; each donates the state."""
    whole, split = shardings()
    # Without check_vma the gradients are those of a device's share, and the mean over the devices is ours to take.
    mapped = jax.shard_map(
        partial(train, axis="data"),
        mesh=whole.mesh,
        in_specs=(whole.spec, split.spec),
        out_specs=(whole.spec, whole.spec),
        check_vma=False,
    )
    return {
        JIT: jax.jit(train, in_shardings=(whole, split), out_shardings=(whole, whole), donate_argnums=0),
        SHARD_MAP: jax.jit(mapped, donate_argnums=0),
    }


def on_devices(state: Tree) -> Tree:
    return jax.block_until_ready(jax.device_put(state, shardings()[0]))


def batches(model: Model) -> list[jax.Array]:
    """The same for every loop, one a step and one more; sequences that count upwards, so that there is to learn."""
    shape = (model.steps + 1, model.sequences * jax.device_count(), 1)
    starts = np.random.default_rng(1).integers(TOKENS, size=shape, dtype=np.int32)
    return [jax.device_put((start + np.arange(LENGTH, dtype=np.int32)) % TOKENS, shardings()[1]) for start in starts]


def run_loop(form: str, saving: bool, model: Model, losses: dict[str, list[float]], path: Path, _: bool) -> Figures:
    """One turn: train; keeps the losses of the last turn of each variant."""
    step_of, state, data = forms()[form], on_devices(first_state(model)), batches(model)
    jax.block_until_ready(step_of(on_devices(first_state(model)), data[-1]))
    seconds, blocked, found = [], [], []
    with jaxckpt.Checkpointer(path / "run") as ckpt:
        for number, batch in enumerate(data[:-1], 1):
            began = time.perf_counter()
            state, loss = jax.block_until_ready(step_of(state, batch))
            trained = time.perf_counter()
            if saving and number % SAVE_EVERY == 0:
                ckpt.save(number, state)
                blocked.append(time.perf_counter() - trained)
            seconds.append(time.perf_counter() - began)
            found.append(loss)
    losses[variant_name(form, saving)] = [float(loss) for loss in found]
    figures = {"step_seconds": statistics.median(seconds), "loop_seconds": sum(seconds)}
    return figures | ({"blocked_seconds": statistics.median(blocked)} if saving else {})


def variant_name(form: str, saving: bool) -> str:
    return form + (SAVING if saving else "")


def measure(model: Model, options: argparse.Namespace) -> tuple[Samples, dict[str, list[float]]]:
    """The loops in turns, what a save takes from them, and the losses of each."""
    losses: dict[str, list[float]] = {}
    turns = {
        variant_name(form, saving): partial(run_loop, form, saving, model, losses)
        for form in forms()
        for saving in (False, True)
    }
    samples = interleave(turns, options.rounds, options.dir, "training")
    pairs = zip(samples[JIT]["step_seconds"], samples[SHARD_MAP]["step_seconds"], strict=True)
    samples[JIT]["step_to_shard_map_ratio"] = [one / other for one, other in pairs]
    for form in forms():
        quiet, saving = samples[form], samples[form + SAVING]
        expected = model.steps * statistics.median(quiet["step_seconds"])
        for loop in (quiet, saving):
            loop["lost_seconds"] = [(seconds - expected) / model.saves for seconds in loop["loop_seconds"]]
        loops = zip(saving["loop_seconds"], quiet["loop_seconds"], strict=True)
        saving["loop_to_quiet_ratio"] = [one / other for one, other in loops]
        lowered = forms()[form].lower(on_devices(first_state(model)), batches(model)[0])
        quiet["collectives"] = [collectives(lowered.compile().as_text()).total]
    return samples, losses


def loss_rows(losses: dict[str, list[float]], tolerance: float) -> list[Row]:
    """How far each loop's losses are from those of `jit` without saves, at the step where it is farthest."""
    return [
        Row(
            "losses",
            f"loss: {name} beside {JIT}",
            "relative_difference_ratio",
            max(map(difference, found, losses[JIT])),
            tolerance,
            f"{found[0]:.3f} to {found[-1]:.3f} in {len(found)} steps",
        )
        for name, found in losses.items()
        if name != JIT
    ]


def difference(one: float, other: float) -> float:
    """Relative; infinite where either is no number, so that no tolerance allows it."""
    found = abs(one - other) / abs(other)
    return math.inf if math.isnan(found) else found


def exchange_rows(model: Model, tolerance: float, directory: Path) -> list[Row]:
    """Save each form's state after one step, restore it into both, and train on; and what was written.

    Raises:
        WrongValuesError: A restored state has other bytes than the saved one.
    """
    first, second, *_ = batches(model)
    rows = []
    for saver, step_of in forms().items():
        state, _ = step_of(on_devices(first_state(model)), first)
        saved = jax.tree.map(np.array, state)
        jaxckpt.save(directory / saver, state)
        rows.append(written_row(f"{saver}, {jax.device_count()} replicas in 1 process", directory / saver))
        _, expected = step_of(state, second)
        for restorer, other in forms().items():
            restored = jaxckpt.restore(directory / saver, like=on_devices(first_state(model)))
            check_bytes(f"{saver} into {restorer}", restored, saved)
            _, loss = other(restored, second)
            far = difference(float(loss), float(expected))
            rows.append(Row("exchange", f"next loss: {saver} into {restorer}", "next_loss_ratio", far, tolerance))
    return rows


def check_bytes(what: str, restored: Tree, saved: Tree) -> None:
    pairs = zip(jax.tree.leaves_with_path(restored), jax.tree.leaves(saved), strict=True)
    for (path, leaf), expected in pairs:
        for shard in leaf.addressable_shards:
            if np.asarray(shard.data).tobytes() != expected.tobytes():
                name = jax.tree_util.keystr(path)
                raise WrongValuesError(f"{what}, {name}: restored other bytes than were saved, on {shard.device}")


def written_row(what: str, path: Path) -> Row:
    """The bytes that all processes wrote, beside those of the state: at most its padding more."""
    info = jaxckpt.describe(path)
    written = sum(index.written_nbytes for index in info.indexes)
    if written < info.nbytes:
        raise WrongValuesError(f"{what}: {written:,} bytes written of {info.nbytes:,}")
    most = (info.nbytes + padding(info)) / info.nbytes
    detail = f"{written:,} / {info.nbytes:,} bytes"
    return Row("written", f"written / state: {what}", "written_ratio", written / info.nbytes, most, detail)


def padding(info: jaxckpt.CheckpointInfo) -> int:
    """The most bytes beside those of the state: the ends of chunks, and gaps between what shares a file."""
    found = 0
    for leaf in info.leaves:
        if leaf.chunk is None:
            found += PACK_ALIGNMENT - 1
        else:
            grid = math.prod(-(-length // chunk) * chunk for length, chunk in zip(leaf.shape, leaf.chunk, strict=True))
            found += grid * np.dtype(leaf.dtype).itemsize - leaf.nbytes
    return found


def process_rows(count: int, model: Model, directory: Path) -> list[Row]:
    """What `count` processes, each with one replica on one CPU device, write of the state together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shape = [str(number) for number in model]
    common = [sys.executable, __file__, "--child", *shape, str(directory / "many"), address, str(count)]
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    started = [subprocess.Popen([*common, str(index)], env=environment) for index in range(count)]
    codes = [process.wait() for process in started]
    if any(codes):
        raise RuntimeError("a process failed to save its share")
    info = jaxckpt.describe(directory / "many")
    check_saved_whole(directory / "many", first_state(model))
    most = max(index.written_nbytes for index in info.indexes)
    unit = max(math.prod(leaf.chunk or leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in info.leaves)
    return [
        written_row(f"{count} replicas in {count} processes", directory / "many"),
        Row(
            "written",
            f"the busiest of {count} processes / state",
            "share_ratio",
            most / info.nbytes,
            1 / count + (unit + padding(info)) / info.nbytes,
            f"{show('_bytes', most)}; {1 / count:.3g} of the state, give or take one chunk, {show('_bytes', unit)}",
        ),
    ]


def check_saved_whole(path: Path, saved: Tree) -> None:
    check_bytes("saved by many processes", jaxckpt.restore(path, like=on_devices(saved)), saved)


def save_replica(model: Model, path: str, address: str, count: int, index: int) -> None:
    """What each of the processes does."""
    jax.distributed.initialize(address, count, index)
    whole = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    state = jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, whole, leaf.__getitem__), first_state(model)
    )
    jaxckpt.save(path, state)


def print_loops(samples: Samples) -> None:
    """The medians; what a form without saves "loses" tells how much of that figure is noise."""
    columns = {
        "step_seconds": "median step",
        "blocked_seconds": "save returns",
        "lost_seconds": "lost per save",
        "loop_to_quiet_ratio": "loop / without saves",
        "step_to_shard_map_ratio": "step / shard_map",
    }
    print_table(
        "training, medians",
        ["variant", *columns.values(), "collectives a step"],
        [
            [
                name,
                *(show(column, figures.get(column)) for column in columns),
                f"{figures['collectives']:.0f}" if "collectives" in figures else "-",
            ]
            for name, figures in medians(samples).items()
        ],
    )
    lost = {name: abs(figures["lost_seconds"]) for name, figures in medians(samples).items()}
    for form in forms():
        if lost[form] > 0.25 * lost[form + SAVING]:
            print(f"note: {form} without saves varies too much for its median to say what a save costs")


def print_rows(rows: list[Row]) -> None:
    print_table(
        "checks",
        ["figure", "at most", "measured", "detail", "verdict"],
        [[row.what, f"{row.most:.6g}", f"{row.measured:.6g}", row.detail, verdict(row)] for row in rows],
    )


def bars(figure: str, samples: Samples, axes: Any) -> None:
    values = {name: figures[figure] for name, figures in medians(samples).items()}
    axes.bar([*values], [1e3 * value for value in values.values()])
    axes.tick_params(axis="x", rotation=20)
    axes.set(ylabel="ms", title=figure.removesuffix("_seconds"))


def parse() -> argparse.Namespace:
    parser = arguments("Data-parallel training through jit and through shard_map, saved in the background.")
    parser.add_argument("--quick", action="store_true", help="a narrower model, fewer saves, 2 rounds")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the model, to try the script out")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="by how much losses may differ (%(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="that hold a replica each (%(default)s); 0: skip it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw here, when matplotlib is installed")
    names = ("WIDTH", "LAYERS", "SEQUENCES", "SAVES", "PATH", "ADDRESS", "COUNT", "INDEX")
    parser.add_argument("--child", nargs=len(names), metavar=names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.scale *= 0.5 if options.quick else 1.0
    options.rounds = options.rounds or (2 if options.quick else 5)
    return options


def main() -> int:
    options = parse()
    if options.child:
        *shape, path, address, count, index = options.child
        save_replica(Model(*map(int, shape)), path, address, int(count), int(index))
        return 0
    use_cpu_devices(8)
    print_machine(options.dir)
    width = 32 * max(1, round(8 * options.scale))
    model = Model(width, max(1, round(4 * options.scale)), 2, 2 if options.quick else 5)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first_state(model)))
    print(f"{model.layers} blocks of width {width}; the state has {show('_bytes', nbytes)} on each device")
    samples, losses = measure(model, options)
    print_loops(samples)
    rows = loss_rows(losses, options.tolerance)
    with fresh_directory(options.dir) as directory:
        rows += exchange_rows(model, options.tolerance, directory)
        if options.processes:
            rows += process_rows(options.processes, model, directory)
    print_rows(rows)
    if options.json:
        results = [*records("training", samples), *(asdict(row) | {"passed": row.passed} for row in rows)]
        write_json(options.json, "data_parallel", options.dir, results)
    if options.plot:
        plot(options.plot, [partial(bars, figure, samples) for figure in ("step_seconds", "lost_seconds")])
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
