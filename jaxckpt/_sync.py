"""Coroutines for callers who have no event loop, or whose loop must not be blocked.

Every save and restore runs in a thread of its own, with a loop of its own, whoever
calls: the planning of a large tree would stall the caller's loop, and a script that
ends must be able to finish. This is the only module that starts threads and loops.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import os
import queue
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from jaxckpt._errors import CheckpointError, SaveTimeoutError
from jaxckpt._info import CheckpointInfo

T = TypeVar("T")

_WORKERS = min(16, 2 + 2 * (os.cpu_count() or 2))


class _Workers(concurrent.futures.ThreadPoolExecutor):
    """Threads for blocking calls that keep serving while the interpreter exits.

    The standard pool refuses work from the moment the main thread ends, when a save in
    flight still has most of its own to do. These threads are daemons, so that one which
    hangs in a dead disk does not keep the process alive once its save has timed out.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=_WORKERS)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0
        self._idle = 0
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._jobs.put(lambda: _settle(future, lambda: fn(*args, **kwargs)))
        with self._lock:
            if self._idle < self._jobs.qsize() and self._started < _WORKERS:
                self._started += 1
                threading.Thread(target=self._serve, name="jaxckpt-worker", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in range(self._started):
            self._jobs.put(None)

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if job is None:
                return
            job()
            del job


def _settle(future: "concurrent.futures.Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001, it is handed to whoever waits
        future.set_exception(error)


class Running(Generic[T]):
    """A coroutine that runs in a thread of its own.

    The thread is not a daemon, whoever starts it: the interpreter waits for it before it exits.

    Args:
        main: The coroutine function.
        timeout_seconds: When to give up with `SaveTimeoutError`; None: never.
        what: What it does, for its thread's name and the error.
    """

    def __init__(self, main: Callable[[], Coroutine[Any, Any, T]], timeout_seconds: float | None, what: str) -> None:
        self._main = main
        self._timeout_seconds = timeout_seconds
        self._what = what
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._run,), name="jaxckpt", daemon=False
        )
        self._thread.start()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end, at most `timeout` seconds, and return the result or raise the failure."""
        try:
            return self.future.result(timeout)
        finally:
            self._join()

    def failure(self) -> BaseException | None:
        """Why it failed, or None where it has not ended or succeeded."""
        return self.future.exception() if self.future.done() else None

    def done(self) -> bool:
        return self.future.done()

    def cancel(self) -> None:
        """Ask it to stop. It ends, with CancelledError, once it has cleaned up."""
        self._stop.set()
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._task.cancel)

    def wait(self) -> T:
        """`result`, for a blocking call: an interrupt stops the work and is raised once that has cleaned up."""
        try:
            return self.future.result()
        except BaseException:
            if not self.future.done():
                self.cancel()
                concurrent.futures.wait([self.future])
            raise
        finally:
            self._join()

    async def wait_async(self) -> T:
        """`result`, without blocking the caller's loop. Cancelling the awaiting task stops the work, cleanly."""
        waiter = asyncio.wrap_future(self.future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([waiter])
            waiter.exception()  # the cancellation is the news
            raise
        finally:
            self._join()

    def disown(self) -> None:
        """In a forked process, where its thread does not exist: whoever asks for the result is told so."""
        self.future = concurrent.futures.Future()
        self.future.set_exception(
            CheckpointError(f"the {self._what} belongs to the process that this one was forked from; wait for it there")
        )

    def _join(self) -> None:
        """Let the thread of work that is done end, so that nothing of it is left."""
        if self.future.done():
            self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._loop.set_default_executor(_Workers())
                result = runner.run(self._limited())
        except BaseException as error:  # noqa: BLE001, it is handed to whoever waits
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    async def _limited(self) -> T:
        self._task = asyncio.current_task()
        if self._stop.is_set():
            raise asyncio.CancelledError
        limit = asyncio.timeout(self._timeout_seconds)
        try:
            async with limit:
                return await self._main()
        except TimeoutError as error:
            if limit.expired():
                raise SaveTimeoutError(
                    f"the {self._what} did not end within {self._timeout_seconds} seconds; "
                    "raise timeout_seconds, or look for a storage that hangs"
                ) from error
            raise


class PendingSave:
    """A save that goes on in the background. Everything it was given is captured already.

    Await it, call `result()`, or use it as a `with` block, which waits at its end. If
    nobody does and it fails, the next save raises its error; if there is none, the
    process exits with a non-zero code and the reason on stderr. A process that ends
    meanwhile finishes the save first.
    """

    def __init__(self, running: Running[CheckpointInfo]) -> None:
        self._running = running
        _pending.append(self)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until the checkpoint is durable, at most `timeout` seconds.

        Raises:
            TimeoutError: `timeout` seconds have passed; the save goes on.
            CheckpointError: The save failed; there is no new checkpoint.
        """
        try:
            return self._running.result(timeout)
        finally:
            self._collected()

    def __await__(self) -> Generator[Any, None, CheckpointInfo]:
        return self._collect_async().__await__()

    async def _collect_async(self) -> CheckpointInfo:
        try:
            return await asyncio.shield(asyncio.wrap_future(self._running.future))
        finally:
            self._collected()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._running.done()

    def add_done_callback(self, function: "Callable[[PendingSave], None]") -> None:
        """Call `function(self)` once the save has ended, well or not, from another thread; at once where it has."""
        self._running.future.add_done_callback(lambda _: function(self))

    def info(self) -> CheckpointInfo:
        """What a save that has succeeded has made; it stays to be collected."""
        return self._running.future.result()

    def cancel(self) -> None:
        """Ask the save to stop. It leaves no checkpoint, unless it was committed already.

        What becomes of it is no news then: only `result()` and `await` raise it.
        """
        self._running.cancel()
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.result()

    def failure(self) -> BaseException | None:
        """Why the save failed, or None while it runs and when it succeeded."""
        return self._running.failure()

    def _collected(self) -> None:
        if self.done():
            self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(ValueError):
            _pending.remove(self)


_pending: list[PendingSave] = []
"""Saves whose result nobody has seen yet."""


def raise_lost_failure() -> None:
    """Raise the failure of a background save that nobody has collected, once."""
    for pending in _pending.copy():  # collecting one removes it
        if pending.done():
            pending.result()


def _report_lost_failures() -> None:
    """At exit: say what failed unseen, and make the exit code tell."""
    # Those that still run were started by another function that runs at exit.
    concurrent.futures.wait([pending._running.future for pending in _pending])
    failures = [failure for pending in _pending if (failure := pending.failure()) is not None]
    for failure in failures:
        print(f"jaxckpt: a background save failed: {type(failure).__name__}: {failure}", file=sys.stderr)
    if failures:
        # An exit code can no longer be raised here; what runs after us at exit is skipped.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _disown_in_child() -> None:
    for pending in _pending:
        pending._running.disown()
    _pending.clear()


atexit.register(_report_lost_failures)
os.register_at_fork(after_in_child=_disown_in_child)
