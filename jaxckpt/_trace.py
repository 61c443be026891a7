"""What a save did when, as a file that chrome://tracing and https://ui.perfetto.dev show."""

import contextlib
import itertools
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec


class Trace:
    """The steps of one save, each from its begin to its end; they overlap.

    Args:
        directory: Where `write` puts the file; None: nothing is kept.

    Source: "Trace Event Format", the async events of it.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = directory
        self._events: list[dict[str, Any]] = []
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def span(self, name: str, **arguments: object) -> Generator[None]:
        """The block is one step; `arguments` tell of what."""
        if self._directory is None:
            yield
            return
        event = {"cat": "jaxckpt", "name": name, "id": next(self._numbers), "pid": os.getpid(), "tid": 0}
        begin = time.perf_counter()
        try:
            yield
        finally:
            described = {key: str(value) for key, value in arguments.items()}
            self._events.append({**event, "ph": "b", "ts": begin * 1e6, "args": described})
            self._events.append({**event, "ph": "e", "ts": time.perf_counter() * 1e6})

    def write(self, name: str) -> None:
        """Put what was kept into `<name>.json` in the directory."""
        if self._directory is not None:
            directory = Path(self._directory)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{name}.json").write_bytes(msgspec.json.encode({"traceEvents": self._events}))
