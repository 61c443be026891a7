"""Processes with JAX imported already: a fork server imports it once, and every test process is a fork of that.

No backend exists in the server, so each process makes devices of its own.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["jax", "jax.numpy", "jaxckpt", "numpy", "tensorstore"])

Pipe = _context.Pipe
Event = _context.Event
Barrier = _context.Barrier


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start `target`, a function of an importable module, in a process of its own."""
    process = _context.Process(target=target, args=args, daemon=True)
    process.start()
    return process
