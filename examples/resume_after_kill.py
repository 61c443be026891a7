"""A training process is killed at random steps, again and again, and ends where an undisturbed one does.

The order of the data counts too: the state of the shuffled batches is saved with each step.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt

STEPS = 40
KILLS = 4
DATA = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


@jax.jit
def train_step(state: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    gradient = jax.grad(lambda w: jnp.mean((x @ w - x.sum(axis=1)) ** 2))(state["w"])
    momentum = 0.9 * state["momentum"] + gradient
    return {"w": state["w"] - 0.01 * momentum, "momentum": momentum}


def train(directory: str, die_at: int) -> None:
    state = {"w": jnp.zeros(8), "momentum": jnp.zeros(8), "step": 0}
    shuffle = np.random.default_rng(1)
    with jaxckpt.Checkpointer(directory, keep_last=2) as ckpt:  # 1
        if ckpt.latest_step() is not None:  # 2
            state, shuffle.bit_generator.state = ckpt.restore(like=state), ckpt.restored.local_data[0]  # 3
        for step in range(state["step"] + 1, STEPS + 1):
            state = train_step(state, DATA[shuffle.permutation(len(DATA))[:16]]) | {"step": step}
            ckpt.save(step, state, local_data=shuffle.bit_generator.state)  # 4
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)  # while that save is in flight


def run(directory: Path, die_at: int = 0) -> int:
    """Train in a process of its own; returns its exit code."""
    return subprocess.run([sys.executable, __file__, str(directory), str(die_at)], check=False).returncode


def main() -> None:
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as directory:
        whole, killed = Path(directory) / "whole", Path(directory) / "killed"
        assert run(whole) == 0
        steps = sorted(random.sample(range(1, STEPS), KILLS))
        assert [run(killed, step) for step in steps] == [-signal.SIGKILL] * KILLS
        assert run(killed) == 0
        undisturbed, resumed = (jaxckpt.restore(path / str(STEPS)) for path in (whole, killed))
    assert undisturbed["step"] == resumed["step"] == STEPS
    for name in ("w", "momentum"):
        assert undisturbed[name].tobytes() == resumed[name].tobytes()
    print(f"killed at steps {steps}: after {STEPS} steps every bit as in the undisturbed run")


if __name__ == "__main__":
    main()
