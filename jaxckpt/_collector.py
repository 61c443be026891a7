"""Pausing the garbage collector."""

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def paused_collector() -> Generator[None]:
    """Keep the garbage collector of the process from running inside the block.

    Planning makes a few records for each leaf, none of them in a cycle. With tens of
    thousands of leaves that sets off full collections, which go through every object of
    the training program and stop all of its threads for a tenth of a second each time.
    Only for blocks that end soon by themselves.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
