"""Host memory: the budget holds in every mode, nothing grows, and a refused pinned allocation is survived."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import RestoreOptions, SaveOptions, _transfer

RunScript = Callable[..., CompletedProcess[str]]

MIB = 1 << 20

PEAK = """
    import sys, jax, jax.numpy as jnp, numpy as np, jaxckpt
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    transfer, budget, devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def status(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

    def peak_above(run):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS")
        result = run()
        return status("VmHWM") - before, result

    options = jaxckpt.SaveOptions(transfer=transfer, max_host_bytes=budget)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:devices]), "x"), PartitionSpec("x"))
    fill = jax.jit(lambda: jnp.arange(1 << 28, dtype=jnp.int32).reshape(1 << 12, -1), out_shardings=sharding)
    jaxckpt.save("warm", {"w": jnp.ones(1 << 10)}, options=options)
    jaxckpt.restore("warm")
    tree = {"w": jax.block_until_ready(fill())}
    saved, _ = peak_above(lambda: jaxckpt.save("large", tree, options=options))
    check = jax.jit(lambda x: (x == jnp.arange(1 << 28, dtype=jnp.int32).reshape(x.shape)).all())
    del tree
    other = NamedSharding(Mesh(np.array(jax.devices()[:4]), "x"), PartitionSpec(None, "x"))
    restored, tree = peak_above(
        lambda: jaxckpt.restore("large", {"w": other}, options=jaxckpt.RestoreOptions(max_host_bytes=budget))
    )
    print(saved, restored - (1 << 30))
    assert check(tree["w"])
"""


@pytest.mark.parametrize("budget", [2048 * MIB, 256 * MIB, 16 * MIB])
@pytest.mark.parametrize(("transfer", "devices"), [("auto", 1), ("pinned", 1), ("pinned", 8), ("staged", 1)])
def test_one_gibibyte_is_saved_and_restored_within_the_budget(
    run_script: RunScript, transfer: str, devices: int, budget: int
) -> None:
    done = run_script(PEAK, transfer, str(budget), str(devices))
    assert done.returncode == 0, done.stderr
    saved, restored = map(int, done.stdout.split())
    assert saved <= budget + 64 * MIB
    assert restored <= budget + 64 * MIB


def test_the_memory_of_a_process_that_saves_again_and_again_stays_flat(run_script: RunScript) -> None:
    done = run_script("""
        import gc, jax.numpy as jnp, numpy as np, jaxckpt

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) << 12

        floor = []
        for round in range(60):
            tree = {"large": jnp.full((2 << 20,), round), "small": [jnp.full(9, round)] * 50, "n": np.full(9, round)}
            jaxckpt.start_save("a", tree, overwrite=True).result()
            restored = jaxckpt.restore("a")
            assert restored["large"][0] == round
            del tree, restored
            gc.collect()
            floor.append(resident())
        print(min(floor[40:]) - min(floor[10:30]))
    """)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 16 * MIB


def refuse_pinned(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    """Let pinned memory run out after `allowed` batches."""
    real, left = jax.device_put, [allowed]

    def device_put(x: Any, device: Any = None, **kwargs: Any) -> Any:
        targets = device if isinstance(device, list) else [device]
        if any(getattr(target, "memory_kind", None) == "pinned_host" for target in targets):
            left[0] -= 1
            if left[0] < 0:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating pinned host memory")
        return real(x, device, **kwargs)

    monkeypatch.setattr(jax, "device_put", device_put)


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_save_goes_on_by_staged_copies_when_pinned_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    tree = {"large": [jnp.full((2 << 20,), i) for i in range(4)], "small": [jnp.full((10,), i) for i in range(5)]}
    with monkeypatch.context() as patch:
        refuse_pinned(patch, allowed)
        with pytest.warns(UserWarning, match="pinned host memory is not to be had") as warned:
            jaxckpt.save(tmp_path / "a", tree, options=SaveOptions(transfer="pinned"))
    assert len(warned) == 1
    for found, value in zip(jax.tree.leaves(jaxckpt.restore(tmp_path / "a")), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(found, value)


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", ["auto", "pinned", "direct", "staged"])
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_no_host_copy_is_left_on_the_arrays_of_the_caller(tmp_path: Path, transfer: str, dtype: str) -> None:
    array = jnp.arange(8).astype(dtype)
    jaxckpt.save(tmp_path / "a", {"w": array}, options=SaveOptions(transfer=transfer))
    assert array._npy_value is None
    assert array.addressable_data(0)._npy_value is None


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [("x",), (None, "x"), ()])
def test_shards_larger_than_the_budget_are_streamed_to_devices_with_memory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: tuple[str | None, ...]
) -> None:
    monkeypatch.setattr(_transfer.Placement, "shares_host_memory", lambda self, sharding: False)
    array = jnp.arange(1 << 22, dtype=jnp.float32).reshape(1 << 10, -1)
    jaxckpt.save(tmp_path / "a", {"w": array, "b": array.astype(jnp.bfloat16)})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    like = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    options = RestoreOptions(max_host_bytes=MIB)
    found = jaxckpt.restore(tmp_path / "a", {"w": like, "b": like}, options=options)
    assert found["w"].sharding == like
    np.testing.assert_array_equal(found["w"], array)
    np.testing.assert_array_equal(found["b"], array.astype(jnp.bfloat16))
