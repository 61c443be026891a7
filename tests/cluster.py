"""Programs of several JAX processes, each with its own CPU devices, on this machine."""

import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import forked

DEVICES = 2


@dataclass(frozen=True)
class Outcome:
    """What a process returned, or its traceback."""

    value: Any = None
    error: str = ""


class Cluster:
    """Runs `work(index, *args)` in `count` processes that make one JAX program.

    A with block: at its end every process that still lives is killed.
    """

    def __init__(self, count: int, work: Callable[..., Any], *args: Any) -> None:
        address = f"127.0.0.1:{_free_port()}"
        self._pipes = [forked.Pipe() for _ in range(count)]
        self.processes = [
            forked.start(_main, address, count, index, ours, work, args) for index, (_, ours) in enumerate(self._pipes)
        ]
        for _, ours in self._pipes:
            ours.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):  # JAX aborts the others, noisily, when the first one is gone
            process.kill()
            process.join()

    def said(self, index: int, timeout: float = 60.0) -> Any:
        """The next thing that a process has sent with `send`, or its Outcome."""
        pipe = self._pipes[index][0]
        assert pipe.poll(timeout), f"process {index} said nothing for {timeout} seconds"
        try:
            return pipe.recv()
        except EOFError:
            return Outcome(error="it died")

    def results(self, timeout: float = 120.0) -> list[Any]:
        """What each process returned; raises where one failed."""
        outcomes = [self.said(index, timeout) for index in range(len(self.processes))]
        for index, outcome in enumerate(outcomes):
            assert not outcome.error, f"process {index}:\n{outcome.error}"
        return [outcome.value for outcome in outcomes]


def run(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(index, *args)` in `count` processes; what each returned."""
    with Cluster(count, work, *args) as cluster:
        return cluster.results()


def send(value: Any) -> None:
    """Tell the test something, from within a process of a cluster."""
    _pipe.send(value)


_pipe: Any = None


def _main(address: str, count: int, index: int, pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _pipe
    _pipe = pipe
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if count > 1:
        jax.distributed.initialize(address, count, index)
    try:
        outcome = Outcome(work(index, *args))
    except BaseException:  # noqa: BLE001, the test shows it
        outcome = Outcome(error=traceback.format_exc())
    pipe.send(outcome)
    pipe.poll(None)  # until the test kills it


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
