"""Runs scripts to their real end, in forks of a process that has JAX imported already.

A fork does what `python script` would: it runs the text and leaves through the interpreter's
own shutdown, with its exit code. Run as a program: it takes folders on stdin, each with a
`script.py`, and answers with the process id, then with the exit code.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self


class Script:
    """A script that runs. Its `stdout` and `stderr` are files in its folder."""

    def __init__(self, folder: Path, pid: int, server: "Server") -> None:
        self._folder = folder
        self._server = server
        self._began = time.monotonic()
        self.pid = pid

    def wait(self) -> "Done":
        code = int(self._server.line())
        seconds = time.monotonic() - self._began
        stdout, stderr = ((self._folder / name).read_text() for name in ("stdout", "stderr"))
        return Done(code, stdout, stderr, seconds)


class Done:
    """How a script ended. A negative code is the signal that killed it."""

    def __init__(self, code: int, stdout: str, stderr: str, seconds: float) -> None:
        self.code, self.stdout, self.stderr, self.seconds = code, stdout, stderr, seconds


class Server:
    """One script at a time; a `with` block."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def start(self, folder: Path, text: str) -> Script:
        (folder / "script.py").write_text(text)
        assert self._process.stdin is not None
        print(folder, file=self._process.stdin, flush=True)
        return Script(folder, int(self.line()), self)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _fork() -> str:
    """Fork for each script; return its text in the fork, and nowhere else."""
    while folder := sys.stdin.readline().strip():
        if pid := os.fork():
            print(pid, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have had ignored
        for fd, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        return Path("script.py").read_text()
    sys.exit()


if __name__ == "__main__":
    import warnings

    import jax.numpy  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import tensorstore  # noqa: F401

    import jaxckpt  # noqa: F401

    warnings.filterwarnings("ignore", message=r"os.fork\(\) was called")
    exec(compile(_fork(), "script.py", "exec"), {"__name__": "__main__"})
