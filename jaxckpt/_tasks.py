"""Concurrent tasks that fail as one."""

import asyncio
from types import TracebackType


class Tasks(asyncio.TaskGroup):
    """A TaskGroup whose block raises the first failure itself, which the other tasks were cancelled for."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise group.exceptions[0]  # noqa: B904, a `from` would hide its own cause
