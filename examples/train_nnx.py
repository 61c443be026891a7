"""Train a Flax NNX model with Optax, stop half-way, and go on from the newest checkpoint."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxckpt

STEPS = 20


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(8, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.inner(x))))


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(step), (32, 8))
    return x, x.sum(axis=1, keepdims=True)


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def train(directory: Path, stop: int) -> tuple[nnx.State, int]:
    """Train up to step `stop`; returns the state, and the step it began with."""
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    both = (model, optimizer)
    with jaxckpt.Checkpointer(directory, keep_last=2) as ckpt:  # 1
        if ckpt.latest_step() is not None:  # 2
            nnx.update(both, ckpt.restore(like=nnx.state(both)))  # 3
        first = int(optimizer.step[...])
        for step in range(first, stop):
            train_step(model, optimizer, *batch(step))
            ckpt.save(step + 1, nnx.state(both))  # 4: weights, moments, and the state of the dropout
    return nnx.state(both), first


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        uninterrupted, _ = train(Path(directory) / "whole", STEPS)
        train(Path(directory) / "run", STEPS // 2)
        resumed, first = train(Path(directory) / "run", STEPS)
    assert first == STEPS // 2
    same = jax.tree.map(lambda one, other: bool(jnp.all(one == other)), resumed, uninterrupted)
    assert all(jax.tree.leaves(same))
    print(f"stopped and resumed at step {first}: after {STEPS} steps every bit as without a stop")


if __name__ == "__main__":
    main()
