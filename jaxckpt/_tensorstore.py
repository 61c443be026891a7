"""TensorStore, as far as we use it: arrays that are written, keys and values, and its errors as ours."""

import asyncio
import errno
import os
import random
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

# Without these a stalled connection waits for ever. They are read when the first request is made.
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "30")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")

import tensorstore as ts

from jaxckpt._errors import CorruptCheckpointError, StorageError
from jaxckpt._tasks import finished

T = TypeVar("T")
Context = ts.Context
Range = tuple[int, int]
"""Bytes of a value: from the first, to before the second."""

_ONE_ATTEMPT = {"max_retries": 0, "initial_delay": "10ms", "max_delay": "10ms"}
"""We try again ourselves: within one deadline, and knowing how often."""

_LOCAL = {
    # One writer for each key, in a directory that nobody else writes: the default lock file
    # would be re-used untruncated after a kill (tensorstore 0.1.86 and older).
    "file_io_locking": {"mode": "none"},
    "file_io_sync": True,
    # More writes the last tenth faster, and keeps the threads of the training program waiting for a core.
    "file_io_concurrency": {"limit": 8},
    "data_copy_concurrency": {"limit": max(2, os.cpu_count() or 2)},
}
_REMOTE = {
    "s3_request_retries": _ONE_ATTEMPT,
    "gcs_request_retries": _ONE_ATTEMPT,
    "s3_request_concurrency": {"limit": 32},
    "gcs_request_concurrency": {"limit": 32},
    "memory_key_value_store": {},
}

_ERRNO = {
    "NOT_FOUND": errno.ENOENT,
    "PERMISSION_DENIED": errno.EACCES,
    "UNAUTHENTICATED": errno.EACCES,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "RESOURCE_EXHAUSTED": errno.EAGAIN,
}
_FINAL = ("NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT", "OUT_OF_RANGE", "UNIMPLEMENTED")
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 10.0


def context(shared: Context | None = None) -> Context:
    """A context for one save; what it does not have it takes from `shared`.

    Sharing one between saves keeps the source arrays alive for ever.
    """
    return Context(_LOCAL, shared) if shared is not None else Context(_LOCAL)


def remote_context(resources: dict[str, Any]) -> Context:
    """What all requests to one object store share: credentials, and how many may be in flight."""
    return Context({**_REMOTE, **resources})


async def open_array(kvstore: dict[str, Any], metadata: dict[str, Any], where: str, shared: Context) -> Any:
    """Open a Zarr array for writing without touching the storage: its `zarr.json` is written by whoever commits it."""
    try:
        return await ts.open(
            {
                "driver": "zarr3",
                "kvstore": kvstore,
                "metadata": metadata,
                # A chunk of zeros is a file like any other: one that is missing is then known to be lost.
                "store_data_equal_to_fill_value": True,
            },
            open=True,
            write=True,
            assume_metadata=True,
            context=shared,
        )
    except ValueError as error:
        raise _as_ours(error, where) from error


async def write_array(array: Any, index: Any, data: Any, where: str, *, keeps: bool, retry_seconds: float) -> None:
    """Write `data`, whole chunks, without a copy unless the storage `keeps` it; durable on return.

    `data` must not change before this returns. Where a storage does not answer in time this
    raises rather than trying again: the request that hangs may still read `data` one day.
    """
    patience = Patience(retry_seconds)
    while True:
        try:
            written = array[index].write(data, can_reference_source_data_indefinitely=not keeps)
            return await finished(_awaited(written, patience.left + 1 if retry_seconds else None))
        except TimeoutError as error:
            raise _as_ours(error, where, patience.attempts + 1) from error
        except ValueError as error:
            await asyncio.sleep(patience.delay_after(error, where))


async def _awaited(future: Any, timeout: float | None) -> None:
    async with asyncio.timeout(timeout):
        await future


class Patience:
    """How long to try again what may go better next time, with growing delays. 0 seconds: not at all."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._retries = seconds > 0
        self.attempts = 0

    @property
    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def delay_after(self, error: Exception, where: str) -> float:
        """How many seconds to wait before the next attempt; raises the error as ours where there is to be none."""
        self.attempts += 1
        delay = min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2 ** (self.attempts - 1)) * random.uniform(0.5, 1)
        if not is_transient(error) or delay > self.left:
            raise _as_ours(error, where, self.attempts if self._retries else 0) from error
        return delay


class Values:
    """Keys and values of one bucket. All methods block, and try again for `retry_seconds`."""

    def __init__(self, kvstore: dict[str, Any], shared: Context, url: str, retry_seconds: float) -> None:
        self._url = url
        self._retry_seconds = retry_seconds
        try:
            self._store = ts.KvStore.open(kvstore, context=shared).result()
        except ValueError as error:
            raise _as_ours(error, url) from error

    def read(self, key: str, wanted: Range | None = None) -> tuple[bytes | None, bytes]:
        """A value, or a range of it, and its generation; None: there is no such key. An empty range costs no bytes."""
        (found,) = self.read_many(key, [wanted])
        return found

    def read_many(self, key: str, ranges: Sequence[Range | None]) -> list[tuple[bytes | None, bytes]]:
        """`read` of several ranges at once."""
        reads = [lambda wanted=wanted: self._store.read(key, byte_range=wanted and slice(*wanted)) for wanted in ranges]
        begun = deque(read() for read in reads)  # taken off one by one, since each keeps the bytes that came
        return [_value(self._insist(key, read, begun.popleft())) for read in reads]

    def write(self, key: str, data: bytes | memoryview | None) -> None:
        """Write, or for None delete, a value."""
        value = bytes(data) if isinstance(data, memoryview) else data
        self._insist(key, lambda: self._store.write(key, value))

    def write_if(self, key: str, data: bytes | None, generation: bytes) -> bytes:
        """`write` where the value still has the generation; the new one, or b"" where it had not.

        One attempt only, which takes a part of the time.

        Raises:
            ValueError, TimeoutError: It failed, or was done and the answer was lost: look what is there.
        """
        return self._store.write(key, data, if_equal=generation).result(timeout=self._retry_seconds / 4 + 1).generation

    def delete_below(self, prefix: str) -> None:
        """Delete every key that begins with `prefix`."""
        self._insist(prefix, lambda: self._store.delete_range(_beginning_with(prefix)))

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`."""
        return [key.decode() for key in self._insist(prefix, lambda: self._store.list(_beginning_with(prefix)))]

    def _insist(self, key: str, start: Callable[[], Any], first: Any = None) -> Any:
        patience = Patience(self._retry_seconds)
        while True:
            try:
                future, first = first or start(), None
                return future.result(timeout=patience.left + 1)
            except (ValueError, TimeoutError) as error:
                time.sleep(patience.delay_after(error, f"{self._url}{key}"))


def _value(found: Any) -> tuple[bytes | None, bytes]:
    return (found.value if found.state == "value" else None, found.stamp.generation)


def is_transient(error: Exception) -> bool:
    """Whether the same request may go better next time."""
    return isinstance(error, TimeoutError) or _status(error) not in ("", *_FINAL)


def _beginning_with(prefix: str) -> ts.KvStore.KeyRange:
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else ts.KvStore.KeyRange()


def _status(error: Exception) -> str:
    found = re.match(r"([A-Z_]+): ", str(error))
    return found[1] if found else ""


def _as_ours(error: Exception, where: str, attempts: int = 0) -> Exception:
    """TensorStore raises ValueError for everything.

    What comes from the storage starts with a status word, and ends with the system's
    error number where there is one. Anything else is a mistake of ours and stays as it is.
    """
    tried = f"; {attempts} attempt{'s' if attempts > 1 else ''}" if attempts else ""
    if isinstance(error, TimeoutError):
        return StorageError(errno.ETIMEDOUT, f"the storage does not answer{tried}", where)
    status = _status(error)
    if not status:
        return error
    text = str(error).split(" [http_response_body=")[0]  # which may quote a signature
    found = re.search(r"os_error_code='(\d+)'", text)
    if status == "OUT_OF_RANGE" and not found:
        return CorruptCheckpointError(f"{where}: it ends before the bytes that are recorded to be in it")
    number = int(found[1]) if found else _ERRNO.get(status, errno.EIO)
    return StorageError(number, f"{os.strerror(number)} ({text}{tried})", where)
