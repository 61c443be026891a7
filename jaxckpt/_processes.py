"""The processes of one JAX program agree on a save, through JAX's coordination service alone.

Never by device collectives: those would have to run in the same order as the ones of the
training step, from another thread. One small message a process passes through the
service; what grows with the number of pieces stays in the files.

The first process (0) begins and commits a save, all write their share. Every wait ends:
with the message, with the reason why another process failed, or after a time with the
names of the processes that are missing.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import msgspec
from jax._src import distributed as jax_distributed
from msgspec import Struct

from jaxckpt._errors import CheckpointError, PeerError, SaveTimeoutError

T = TypeVar("T")

_KEPT = 32
"""Conversations whose messages stay, for processes that are late to read them."""
_SHORT_SECONDS = 0.5
_MOST_NAMED = 16

_numbers = itertools.count()


def next_number() -> int:
    """The number of a save. To be taken first of all in every call that saves, whatever becomes of it."""
    return next(_numbers)


class _Message(Struct, frozen=True):
    """What one process tells: a value, or which process failed and why."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    failed: int | None = None
    reason: str = ""


class Conversation:
    """What all processes say about one save. They must begin their saves in the same order.

    Args:
        number: Of the save, from `next_number`.
        timeout_seconds: How long a process waits for the others, beyond its own work.
    """

    def __init__(self, number: int, timeout_seconds: float) -> None:
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._timeout_seconds = timeout_seconds
        self._number = number
        self._told: set[str] = set()
        self._client: Any = _client() if self.count > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that begins and commits."""
        return self.index == 0

    async def tell(self, phase: str, value: Any) -> None:
        """Say `value`, once, to all others (the first process), or to the first."""
        if self.count > 1:
            message = _Message(msgspec.Raw(msgspec.json.encode(value)))
            await self._ask(phase, time.monotonic() + self._timeout_seconds, self._set, phase, message)

    async def hear(self, phase: str, kind: type[T], *, after: str | None = None) -> T:
        """What the first process says, which it does once the others have spoken in the phase `after`.

        Raises:
            PeerError: A process failed; its reason.
            SaveTimeoutError: Nothing is said; names who is missing.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while (data := await self._ask(phase, deadline, self._get, phase)) is None:
            if time.monotonic() > deadline:
                silent = await self._silent(after) if after else []
                raise self._timeout(after if silent and after else phase, silent or [0])
        return _value(data, kind)

    async def collect(self, phase: str, kind: type[T]) -> list[T]:
        """What every other process says, for the first one, in their order.

        Raises:
            PeerError: One failed; its reason.
            SaveTimeoutError: Some say nothing; names them.
        """
        found: dict[int, T] = {}
        deadline = time.monotonic() + self._timeout_seconds
        pause = 0.002
        while len(found) < self.count - 1:
            said = await self._ask(phase, deadline, self._said, phase)
            found |= {process: _value(data, kind) for process, data in said.items() if process not in found}
            if len(found) < self.count - 1 and time.monotonic() > deadline:
                raise self._timeout(phase, await self._silent(phase))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SHORT_SECONDS)
        return [found[process] for process in sorted(found)]

    async def agreed(self, value: bool) -> bool:
        """The value of the first process, as the whole of the conversation."""
        if not self.is_first:
            return await self.hear("begin", bool)
        await self.tell("begin", value)
        return value

    def fail(self, phases: Sequence[str], error: BaseException) -> None:
        """Say that this process has failed in each of its `phases` in which it has said nothing yet. Never raises."""
        if self.count == 1:
            return
        failed, reason = self.index, f"{type(error).__name__}: {error}"
        if isinstance(error, PeerError):
            failed, reason = error.process, error.reason
        message = _Message(failed=failed, reason=reason)
        for phase in phases:
            if phase not in self._told:
                with contextlib.suppress(PeerError):
                    self._set(phase, message)

    async def failure(self, phase: str) -> PeerError | None:
        """The failure that the first process has told in a phase so far."""
        if self.is_first:
            return None
        try:
            said = await self._ask(phase, time.monotonic(), self._said, phase)
            _value(said.get(0, b"{}"), object)
        except PeerError as error:
            return error
        except SaveTimeoutError:
            pass
        return None

    async def _ask(self, phase: str, deadline: float, function: Callable[..., T], *args: Any) -> T:
        """Ask the coordination service, which does not answer while the process that runs it is stopped."""
        asking = asyncio.ensure_future(asyncio.to_thread(function, *args))
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps after we have left
        await asyncio.wait([asking], timeout=max(0.0, deadline - time.monotonic()) + 2 * _SHORT_SECONDS)
        if not asking.done():
            raise self._timeout(phase, [0])
        return asking.result()

    async def _silent(self, phase: str) -> list[int]:
        """Who has said nothing in a phase in which all but the first process speak."""
        said = await self._ask(phase, time.monotonic(), self._said, phase)
        return [process for process in range(1, self.count) if process not in said]

    def _get(self, phase: str) -> bytes | None:
        try:
            return self._client.blocking_key_value_get_bytes(self._key(phase, 0), round(_SHORT_SECONDS * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise _lost(error) from error

    def _set(self, phase: str, message: _Message) -> None:
        self._told.add(phase)
        try:
            self._client.key_value_set_bytes(self._key(phase, self.index), msgspec.json.encode(message))
            if self.is_first and self._number >= _KEPT:
                self._client.key_value_delete(f"jaxckpt/{self._number - _KEPT}/")
        except jax.errors.JaxRuntimeError as error:
            raise _lost(error) from error

    def _said(self, phase: str) -> dict[int, bytes]:
        """What each process has said so far in a phase."""
        try:
            found = self._client.key_value_dir_get_bytes(f"jaxckpt/{self._number}/{phase}/")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return {}
            raise _lost(error) from error
        return {int(key.rsplit("/", 1)[-1]): data for key, data in found}

    def _timeout(self, phase: str, processes: Sequence[int]) -> SaveTimeoutError:
        names = ", ".join(map(str, processes[:_MOST_NAMED])) + (" ..." if len(processes) > _MOST_NAMED else "")
        return SaveTimeoutError(
            f"process {names} of {self.count} did not arrive within {self._timeout_seconds} seconds "
            f"in the phase {phase!r} of save number {self._number}; look whether it runs, and whether all processes "
            "call the same saves in the same order, or raise process_timeout_seconds"
        )

    def _key(self, phase: str, process: int) -> str:
        return f"jaxckpt/{self._number}/{phase}/{process}"


def _value(data: bytes, kind: type[T]) -> T:
    message = msgspec.json.decode(data, type=_Message)
    if message.failed is not None:
        raise PeerError(message.failed, message.reason)
    return msgspec.json.decode(message.value, type=kind)


def _lost(error: Exception) -> PeerError:
    return PeerError(0, f"JAX's coordination service, which it runs, does not answer: {error}")


def _client() -> Any:
    # Private in every release so far (jax 0.8 to 0.12); nothing public passes messages without a device.
    client = jax_distributed.global_state.client
    if client is None:
        raise CheckpointError(
            f"this is one of {jax.process_count()} processes, but they have no coordination service; "
            "call jax.distributed.initialize() in each of them first"
        )
    return client
