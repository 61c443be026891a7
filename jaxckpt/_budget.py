"""Counting bytes: how many may be in flight, and how many are done."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

_LEAST_BYTES = 64 << 20


class Budget:
    """A fixed number of bytes, lent in the order of asking. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncGenerator[None]:
        """Hold `nbytes` for the length of the block; wait until that many are free.

        A request for more than the whole limit waits until it is alone.
        """
        await self.acquire(nbytes)
        try:
            yield
        finally:
            self.release(nbytes)

    async def acquire(self, nbytes: int) -> None:
        """Take `nbytes` that another task will `release`; `reserve` is this as a block."""
        if not self._waiting and self._fits(nbytes):
            self._used += nbytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(nbytes)
            else:
                self._waiting.remove((nbytes, turn))
                self._wake()
            raise

    def release(self, nbytes: int) -> None:
        self._used -= nbytes
        self._wake()

    def _fits(self, nbytes: int) -> bool:
        return self._used == 0 or self._used + nbytes <= self.limit

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, turn = self._waiting.popleft()
            self._used += nbytes
            turn.set_result(None)


class Progress:
    """Bytes done out of a total, told to `report` as `report(done, total)`."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._done, self._total = 0, total
        self._report = report or (lambda done, total: None)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._report(self._done, self._total)


def default_host_bytes() -> int:
    """A quarter of the host memory that this process could still take, in bytes."""
    return max(_LEAST_BYTES, min(_available_in_machine(), _available_in_cgroup()) // 4)


def _available_in_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _available_in_cgroup() -> int:
    """What a container's limit leaves beside its processes' own pages; page cache gives way."""
    for limit, stat, own in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "anon"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "total_rss"),
    ):
        try:
            usage = dict(line.split() for line in Path(stat).read_text().splitlines())
            return max(0, int(Path(limit).read_text()) - int(usage[own]))
        except (OSError, ValueError, KeyError):
            continue
    return 1 << 62
