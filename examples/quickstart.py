"""Save a sharded tree, restore it onto another sharding, compare."""

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=8"
)  # eight CPU devices, if there is no other

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt


def on(mesh_shape: tuple[int, ...], axes: tuple[str, ...], spec: PartitionSpec) -> NamedSharding:
    devices = np.array(jax.devices()[: np.prod(mesh_shape)]).reshape(mesh_shape)
    return NamedSharding(Mesh(devices, axes), spec)


def main() -> None:
    count = len(jax.devices())
    rows = on((count,), ("data",), PartitionSpec("data"))
    params = {
        "embed": jax.device_put(jax.random.normal(jax.random.key(0), (4096, 1024)), rows),
        "scale": jnp.ones((1024,), jnp.bfloat16),
    }
    state = {"params": params, "step": 1000, "rng": jax.random.key(1)}

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"

        pending = jaxckpt.start_save(path, state)  # returns when the tree is captured: train on, donate, overwrite
        info = pending.result()  # returns when it would survive a power cut
        print(f"saved {info.nbytes:,} bytes, captured after {1e3 * info.captured_seconds:.1f} ms")

        columns = on((max(1, count // 4),), ("model",), PartitionSpec(None, "model"))
        like = {"params": {"embed": columns, "scale": params["scale"]}, "step": 0, "rng": jax.random.key(0)}
        restored = jaxckpt.restore(path, like)

    assert restored["params"]["embed"].sharding == columns
    assert restored["step"] == 1000
    np.testing.assert_array_equal(restored["params"]["embed"], params["embed"])
    np.testing.assert_array_equal(restored["params"]["scale"], params["scale"])
    np.testing.assert_array_equal(jax.random.key_data(restored["rng"]), jax.random.key_data(state["rng"]))
    print(f"restored onto {columns.spec} over {columns.mesh.size} device(s): every byte equal")


if __name__ == "__main__":
    main()
