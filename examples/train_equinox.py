"""Train an Equinox model with Optax, stop half-way, and go on from the newest checkpoint."""

import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxckpt

STEPS = 20
OPTIMIZER = optax.adamw(1e-2)


def arrays(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_array)  # a model's functions are code, not state


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(step), (32, 8))
    return x, x.sum(axis=1, keepdims=True)


@eqx.filter_jit
def train_step(model: eqx.nn.MLP, moments: optax.OptState, x: jax.Array, y: jax.Array) -> tuple[Any, optax.OptState]:
    gradients = eqx.filter_grad(lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2))(model)
    updates, moments = OPTIMIZER.update(gradients, moments, arrays(model))
    return eqx.apply_updates(model, updates), moments


def train(directory: Path, stop: int) -> tuple[Any, int]:
    """Train up to step `stop`; returns the state, and the step it began with."""
    model = eqx.nn.MLP(8, 1, width_size=64, depth=1, key=jax.random.key(0))
    state = (model, OPTIMIZER.init(arrays(model)))
    with jaxckpt.Checkpointer(directory, keep_last=2) as ckpt:  # 1
        if first := ckpt.latest_step() or 0:  # 2
            state = eqx.combine(ckpt.restore(like=arrays(state)), state)  # 3
        for step in range(first, stop):
            state = train_step(*state, *batch(step))
            ckpt.save(step + 1, arrays(state))  # 4
    return arrays(state), first


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        uninterrupted, _ = train(Path(directory) / "whole", STEPS)
        train(Path(directory) / "run", STEPS // 2)
        resumed, first = train(Path(directory) / "run", STEPS)
    assert first == STEPS // 2
    assert eqx.tree_equal(resumed, uninterrupted)
    print(f"stopped and resumed at step {first}: after {STEPS} steps every bit as without a stop")


if __name__ == "__main__":
    main()
