"""What is killed in test_retention_model: a process that saves steps with retention."""

import os
import signal
import threading
from typing import Any

import jax.numpy as jnp

import jaxckpt
from jaxckpt import SaveOptions

OPTIONS = SaveOptions(pack_below_bytes=64)  # so that there are packs and arrays of their own


def tree(step: int) -> dict[str, Any]:
    """What is saved as `step`; a part of it is the same in all."""
    return {"w": jnp.full(32, step), "frozen": jnp.arange(32), "small": jnp.full(3, step), "step": step}


def saves(channel: Any, root: str, arguments: dict[str, Any], wanted: list[tuple[int, dict]], after: float) -> None:
    """Save the wanted steps, telling each that is durable, until killed some seconds after the first began."""
    ckpt = jaxckpt.Checkpointer(root, options=OPTIONS, **arguments)
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step, metrics in wanted:
        pending = ckpt.save(step, tree(step), metrics=metrics)
        assert pending is not None
        pending.result()
        channel.send(step)
    ckpt.wait()
    threading.Event().wait()
