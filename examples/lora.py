"""Train small adapters on a frozen base: only the first save writes the base, the others link to it."""

import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt

WIDTH, RANK, LAYERS = 1024, 8, 4


def initial() -> dict[str, dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), (LAYERS, 2))
    return {
        "base": {f"layer{n}": jax.random.normal(keys[n, 0], (WIDTH, WIDTH)) / 32 for n in range(LAYERS)},
        "down": {f"layer{n}": jax.random.normal(keys[n, 1], (WIDTH, RANK)) / 32 for n in range(LAYERS)},
        "up": {f"layer{n}": jnp.zeros((RANK, WIDTH)) for n in range(LAYERS)},
    }


@jax.jit
def train_step(state: dict[str, dict[str, jax.Array]], x: jax.Array) -> dict[str, dict[str, jax.Array]]:
    def loss(adapters: dict[str, dict[str, jax.Array]]) -> jax.Array:
        y = x
        for name, weights in state["base"].items():
            y = jnp.tanh(y @ weights + y @ adapters["down"][name] @ adapters["up"][name])
        return jnp.mean((y - x) ** 2)

    adapters = {name: state[name] for name in ("down", "up")}
    gradients = jax.grad(loss)(adapters)
    return state | jax.tree.map(lambda weights, gradient: weights - gradient, adapters, gradients)


def main() -> None:
    state = initial()
    with tempfile.TemporaryDirectory() as directory:
        written = []
        with jaxckpt.Checkpointer(directory) as ckpt:
            for step in range(3):
                state = train_step(state, jax.random.normal(jax.random.key(step), (16, WIDTH)))
                written.append(ckpt.save(step, state).result().written_nbytes)
        shutil.rmtree(Path(directory) / "0")  # each step is complete, so the first may go
        restored = jaxckpt.restore(Path(directory) / "2", like=state)
        assert jaxckpt.verify(Path(directory) / "2").ok
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert written[1] < 0.05 * written[0]
    print(f"the first save wrote {written[0]:,} bytes, the second {written[1]:,}; each step is complete")


if __name__ == "__main__":
    main()
