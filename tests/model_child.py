"""The other process of test_model: it saves, deletes, or dies in the middle of either."""

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import syscalls_child

import jaxckpt


def serve(channel: Connection) -> None:
    """Do what `channel` asks for; with a number, die at that fsync."""
    sync = os.fsync
    left = 0

    def counted(fd: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(fd)

    os.fsync = counted
    commands: dict[str, Any] = {"save": syscalls_child.save, "delete": jaxckpt.delete}
    while command := channel.recv():
        name, left, *args = command
        commands[name](*args)
        channel.send("done")
