"""Where the steps of a training run are: below its root, and first below a nearer directory if it has one."""

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt import _api
from jaxckpt._errors import CheckpointNotFoundError, CorruptCheckpointError
from jaxckpt._location import PathLike, parse
from jaxckpt._sync import Running

_STEP = re.compile(r"0|[1-9]\d*")
_log = logging.getLogger("jaxckpt")


class Place:
    """The steps below one directory or prefix, each a checkpoint named for its number."""

    def __init__(self, root: PathLike, storage_options: Mapping[str, Any] | None = None) -> None:
        self._root = parse(root, storage_options)
        self.storage_options = storage_options

    def __str__(self) -> str:
        return str(self._root)

    @property
    def is_local(self) -> bool:
        return self._root.is_local

    def path(self, step: int) -> str:
        return self._root.child(str(step)).path

    def steps(self) -> list[int]:
        """The committed ones, in order."""
        return sorted(int(name) for name in self._root.names() or [] if _STEP.fullmatch(name) and self.has(int(name)))

    def has(self, step: int) -> bool:
        """Whether a step is committed."""
        return self._root.child(str(step)).is_file("manifest.json")

    def delete(self, step: int) -> None:
        """Delete a step. Gone already is fine."""
        with contextlib.suppress(CheckpointNotFoundError):
            _api.delete(self.path(step), storage_options=self.storage_options)


class Uploads:
    """Copies steps from `staging` to `root` in the background, in the order they come, one at a time.

    What is uploaded leaves `staging`, but for the newest. What a process has not uploaded
    before it ended, or could not, is taken up by the next one.

    Args:
        staging, root: From where to where.
        most: How many steps may wait before `wait_for_room` waits.
        using: Makes a block in which nobody deletes a step.
    """

    def __init__(
        self, staging: Place, root: Place, most: int, using: Callable[[int], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._staging = staging
        self._root = root
        self._most = most
        self._using = using
        self._lock = threading.Condition()
        self._waiting: list[int] = staging.steps()
        self._running: Running[None] | None = None
        self._failure: BaseException | None = None
        if self._waiting:
            self._start()

    def add(self, step: int) -> None:
        """Upload a step that was committed."""
        with self._lock:
            if step not in self._waiting[1:]:  # the first may be half way through what was replaced
                self._waiting.append(step)
            self._start()

    def wait_for_room(self) -> None:
        """Wait until fewer than `most` steps wait.

        Raises:
            CheckpointError: An upload failed.
        """
        self._wait(self._most - 1)

    def wait(self) -> None:
        """Wait until all are uploaded; raises as `wait_for_room`."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        with self._lock:
            if self._waiting and self._failure is None:
                self._start()
            self._lock.wait_for(lambda: len(self._waiting) <= most or self._failure is not None)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _start(self) -> None:
        with self._lock:
            if self._running is None and self._failure is None:
                self._running = Running(self._upload_all, None, "upload")

    async def _upload_all(self) -> None:
        await asyncio.to_thread(self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = None
                    return
                step = self._waiting[0]
            try:
                self._upload(step)
            except BaseException as error:  # noqa: BLE001, it is handed to whoever waits
                _log.error("step %d stays in %s: %s", step, self._staging, error)
                with self._lock:
                    if isinstance(error, CorruptCheckpointError):
                        self._waiting.pop(0)  # it will not get better, and must not keep the others waiting
                    self._failure, self._running = error, None
                    self._lock.notify_all()
                return
            with self._lock:
                self._waiting.pop(0)
                self._lock.notify_all()

    def _upload(self, step: int) -> None:
        with self._using(step), contextlib.suppress(CheckpointNotFoundError):  # retention was faster
            _api.copy(
                self._staging.path(step),
                self._root.path(step),
                overwrite=True,
                storage_options=self._staging.storage_options,
                dest_storage_options=self._root.storage_options,
            )
            _log.info("uploaded step %d to %s", step, self._root)
        staged = self._staging.steps()
        with self._lock:
            uploaded = [old for old in staged[:-1] if old not in self._waiting[1:]]
        for old in uploaded:
            if self._root.has(old):
                self._staging.delete(old)
