"""Processes of test_trust, which stop in the middle of what they do."""

import os
import signal
import threading
from typing import Any

import syscalls_child

import jaxckpt
from jaxckpt import _commit
from jaxckpt._local import LocalLocation


def save_and_stop(path: str, method: str) -> None:
    """Stop, as by Ctrl-Z, when the storage is asked for `method`; go on when continued."""
    original = getattr(LocalLocation, method)
    stopped = False

    def stopping(self: LocalLocation, *args: Any, **kwargs: Any) -> Any:
        nonlocal stopped
        if not stopped:
            stopped = True
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no further
        return original(self, *args, **kwargs)

    setattr(LocalLocation, method, stopping)
    syscalls_child.save(path, 2, True)


def delete_and_die(path: str) -> None:
    _commit._discard_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    jaxckpt.delete(path)
