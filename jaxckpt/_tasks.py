"""Concurrent tasks that fail as one, and work that is not left behind when a task is cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_LINGER_SECONDS = 10


class Tasks(asyncio.TaskGroup):
    """A TaskGroup whose block raises the first failure itself, which the other tasks were cancelled for."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise group.exceptions[0]  # noqa: B904, a `from` would hide its own cause


async def finished(work: Awaitable[T]) -> T:
    """Await what cannot be stopped. A cancelled task waits for its end too, if that comes soon.

    So whoever cleans up next comes after it; only a storage that hangs is left behind.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running], timeout=_LINGER_SECONDS)
        if running.done() and not running.cancelled():
            running.exception()  # it is not news any more
        raise


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a worker thread; see `finished`."""
    return await finished(asyncio.to_thread(function, *args, **kwargs))


async def each_in_thread(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Run a blocking call for every item in worker threads, several at a time; the results in order."""
    async with Tasks() as tasks:
        running = [tasks.create_task(in_thread(function, item)) for item in items]
    return [task.result() for task in running]


async def clean_up(function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run a blocking call after a failure, but do not wait for long: the storage may hang."""
    await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))], timeout=_LINGER_SECONDS)
