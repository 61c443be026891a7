"""What is killed in test_ecosystem: a process that trains a small model of one framework and saves each step.

Each framework gives a state, which is what a user of it would save, and a function that makes the next.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt

Advance = Callable[[Any, jax.Array, jax.Array], Any]
Bits = dict[str, tuple[str, tuple[int, ...], bytes]]


class Batches:
    """An endless iterator over shuffled data, whose state says where it is."""

    def __init__(self) -> None:
        self._chance = np.random.default_rng(7)
        self._x = self._chance.normal(size=(50, 4)).astype(np.float32)
        self._order: list[int] = []

    def __next__(self) -> tuple[jax.Array, jax.Array]:
        if len(self._order) < 8:
            self._order += self._chance.permutation(len(self._x)).tolist()
        chosen, self._order = self._order[:8], self._order[8:]
        x = jnp.asarray(self._x[chosen])
        return x, jnp.sin(x).sum(axis=1, keepdims=True)

    @property
    def state(self) -> dict[str, Any]:
        return {"chance": self._chance.bit_generator.state, "order": self._order}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._chance.bit_generator.state = state["chance"]
        self._order = state["order"]


def loss(predicted: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((predicted - y) ** 2)


def nnx() -> tuple[Any, Advance]:
    """Parameters, moments, batch statistics and the keys of a dropout, as one `nnx.State`."""
    import optax
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = nnx.Linear(4, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.outer = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))

    model = Network(nnx.Rngs(0))
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)))

    @jax.jit
    def advance(state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        optimizer.update(model, nnx.grad(lambda model: loss(model(x), y))(model))
        return nnx.state((model, optimizer))

    return state, advance


def linen() -> tuple[Any, Advance]:
    """A `TrainState` with a key of its own beside it."""
    import optax
    from flax import linen
    from flax.training.train_state import TrainState

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
            x = linen.Dropout(0.2, deterministic=not train)(linen.relu(linen.Dense(16)(x)))
            return linen.Dense(1)(x)

    network = Network()
    params = network.init(jax.random.key(0), jnp.zeros((1, 4)), train=False)
    train_state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.adamw(1e-2))
    train_state = train_state.replace(step=jnp.int32(0))  # it begins as a Python int, which no saved array is put into

    @jax.jit
    def advance(state: Any, x: jax.Array, y: jax.Array) -> Any:
        key, now = jax.random.split(state["key"])
        train = state["train"]
        gradients = jax.grad(lambda params: loss(train.apply_fn(params, x, rngs={"dropout": now}), y))(train.params)
        return {"train": train.apply_gradients(grads=gradients), "key": key}

    return {"train": train_state, "key": jax.random.key(1)}, advance


def equinox() -> tuple[Any, Advance]:
    """The arrays of a model and its moments; the functions in it are code."""
    import equinox as eqx
    import optax

    optimizer = optax.adamw(1e-2)
    model = eqx.nn.MLP(4, 1, width_size=16, depth=1, key=jax.random.key(0))
    arrays, functions = eqx.partition(model, eqx.is_array)

    @jax.jit
    def advance(state: Any, x: jax.Array, y: jax.Array) -> Any:
        arrays, moments = state
        gradients = jax.grad(lambda arrays: loss(jax.vmap(eqx.combine(arrays, functions))(x), y))(arrays)
        updates, moments = optimizer.update(gradients, moments, arrays)
        return eqx.apply_updates(arrays, updates), moments

    return (arrays, optimizer.init(arrays)), advance


def optax() -> tuple[Any, Advance]:
    """A dict of plain arrays and the nested namedtuples of a chain of optimizers."""
    import optax

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale_by_schedule(optax.linear_schedule(1, 0, 99))
    )
    params = {"w": jnp.ones((4, 1)), "b": jnp.zeros(())}

    @jax.jit
    def advance(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params = state["params"]
        gradients = jax.grad(lambda params: loss(x @ params["w"] + params["b"], y))(params)
        updates, moments = optimizer.update(gradients, state["moments"])
        updates = jax.tree.map(lambda update: -0.05 * update, updates)
        return {"params": optax.apply_updates(params, updates), "moments": moments}

    return {"params": params, "moments": optimizer.init(params)}, advance


def haiku() -> tuple[Any, Advance]:
    """Dicts by module and parameter, whose names hold slashes and tildes, as Haiku makes them."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "network/~/linear": {"w": jax.random.normal(keys[0], (4, 16)), "b": jnp.zeros(16)},
        "network/~/linear_1": {"w": jax.random.normal(keys[1], (16, 1)), "b": jnp.zeros(1)},
    }
    momentum = jax.tree.map(jnp.zeros_like, params)

    def network(params: Any, x: jax.Array) -> jax.Array:
        inner, outer = params["network/~/linear"], params["network/~/linear_1"]
        return jax.nn.relu(x @ inner["w"] + inner["b"]) @ outer["w"] + outer["b"]

    @jax.jit
    def advance(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, momentum, key = state
        key, now = jax.random.split(key)
        noisy = x + 0.01 * jax.random.normal(now, x.shape)
        gradients = jax.grad(lambda params: loss(network(params, noisy), y))(params)
        momentum = jax.tree.map(lambda old, gradient: 0.9 * old + gradient, momentum, gradients)
        return jax.tree.map(lambda weight, update: weight - 1e-3 * update, params, momentum), momentum, key

    return (params, momentum, jax.random.PRNGKey(1)), advance


def keras() -> tuple[Any, Advance]:
    """The values of a model's and its optimizer's variables, which Keras calls the stateless form."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    groups = {
        "trainable": model.trainable_variables,
        "other": model.non_trainable_variables,
        "optimizer": optimizer.variables,
    }

    @jax.jit
    def advance(state: Any, x: jax.Array, y: jax.Array) -> Any:
        def objective(trainable: Any) -> Any:
            predicted, other = model.stateless_call(trainable, state["other"], x, training=True)
            return loss(predicted, y), other

        gradients, other = jax.grad(objective, has_aux=True)(state["trainable"])
        trainable, moments = optimizer.stateless_apply(state["optimizer"], gradients, state["trainable"])
        return {"trainable": trainable, "other": other, "optimizer": moments}

    return {name: [variable.value for variable in variables] for name, variables in groups.items()}, advance


FRAMEWORKS = {function.__name__: function for function in (nnx, linen, equinox, optax, haiku, keras)}


def compile_once(cache: str) -> None:
    """Keep what was compiled in `cache`, for the next process."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def undisturbed(channel: Connection, cache: str, framework: str, steps: int) -> None:
    """Train without saving anything; tells the final state."""
    compile_once(cache)
    state, advance = FRAMEWORKS[framework]()
    data = Batches()
    for _ in range(steps):
        state = advance(state, *next(data))
    channel.send(bits(state))


def train(
    channel: Connection, cache: str, framework: str, steps: int, directory: str, lifetime: int, seed: int
) -> None:
    """Resume, and train until killed after `lifetime` steps; otherwise tells the final state, held and saved."""
    compile_once(cache)
    state, advance = FRAMEWORKS[framework]()
    data = Batches()
    chance = random.Random(seed)
    with jaxckpt.Checkpointer(directory, keep_last=2) as ckpt:
        first = ckpt.latest_step() or 0
        if first:
            state = ckpt.restore(like=state)
            assert ckpt.restored is not None
            data.state = ckpt.restored.local_data[jax.process_index()]
        channel.send(first)
        for step in range(first + 1, steps + 1):
            state = advance(state, *next(data))
            ckpt.save(step, state, local_data=data.state)
            if step == first + lifetime:
                time.sleep(chance.uniform(0, 0.03))
                os.kill(os.getpid(), signal.SIGKILL)
        ckpt.wait()
        channel.send((bits(state), bits(ckpt.restore(like=state))))


def bits(tree: Any) -> Bits:
    """Path -> dtype, shape and bytes of each leaf."""
    return {jax.tree_util.keystr(path): _bits(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()
