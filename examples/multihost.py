"""Two JAX processes save one sharded tree together; one process restores it.

On a cluster every host runs the function `work` after `jax.distributed.initialize()`, with
a path on storage that all of them share. Here this script starts both processes itself.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt

PROCESSES = 2
VALUE = np.arange(1024 * 512, dtype=np.float32).reshape(1024, 512)


def work(path: Path) -> None:
    """Save, in each process."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    rows = jax.make_array_from_callback(VALUE.shape, sharding, lambda index: VALUE[index])
    info = jaxckpt.save(path, {"rows": rows, "step": 1000})  # all return when it is committed
    wrote = info.indexes[jax.process_index()].written_nbytes
    print(f"process {jax.process_index()} wrote {wrote:,} of {info.nbytes:,} bytes", flush=True)


def launch(path: Path) -> None:
    """Start the processes and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    started = [
        subprocess.Popen([sys.executable, __file__, str(path), address, str(number)], env=environment)
        for number in range(PROCESSES)
    ]
    assert [process.wait(timeout=120) for process in started] == [0] * PROCESSES


def main() -> None:
    if len(sys.argv) > 1:
        path, address, number = sys.argv[1:]
        jax.distributed.initialize(address, PROCESSES, int(number))
        work(Path(path))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"
        launch(path)
        restored = jaxckpt.restore(path)
        np.testing.assert_array_equal(restored["rows"], VALUE)
        print(f"restored {restored['rows'].nbytes:,} bytes in one process, step {restored['step']}: every byte equal")


if __name__ == "__main__":
    main()
