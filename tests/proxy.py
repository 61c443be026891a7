"""A proxy that injects faults between a client and an object store.

It runs in a thread of its own and forwards the client's Host header and path as they came, so signatures stay valid.
The keys that fault patterns see are unquoted; those of a list are its prefix, those of a delete of several objects are
all its keys, one a line.
"""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote
from xml.sax.saxutils import escape, unescape

import http1

# What an error answer of each status says: the code for S3, and the reason for GCS.
_ERRORS = {
    "503": ("SlowDown", "backendError"),
    "429": ("TooManyRequests", "rateLimitExceeded"),
    "500": ("InternalError", "internalError"),
    "409": ("ConditionalRequestConflict", "conflict"),
    "403": ("AccessDenied", "forbidden"),
    "404": ("NoSuchKey", "notFound"),
}
ERRORS = tuple(_ERRORS)
KINDS = (*ERRORS, "reset", "lost_answer", "half_body", "truncated", "flip_out", "flip_in", "slow", "hang")
VERBS = ("put", "get", "head", "list", "delete")


@dataclass
class Fault:
    """What goes wrong, for which requests.

    Kinds: the statuses of `ERRORS`, answered in the store's place; `reset` before the request reaches the store;
    `lost_answer`, a reset after the store has done it; `half_body`, a reset after half of the body has reached the
    store; `truncated`, half of the answer's body and then the close; `flip_out` and `flip_in`, one bit of the object's
    bytes on the way to the store or from it; `slow`, passed on after `seconds`; `hang`, no answer until the proxy
    closes.

    A fault that a request has no place for (a flip in a body that is empty, a truncated error) stays for a later one.

    Args:
      verb: one of `VERBS`, or "" for all. `put` is every write of an object: uploads, parts of them, copies.
      key_pattern: a regular expression that is searched for in the key.
      times: how many requests it hits; None for all.
      after: how many requests that match pass unharmed before.
    """

    kind: str
    verb: str = ""
    key_pattern: str = ""
    times: int | None = 1
    after: int = 0
    seconds: float = 1.0

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert self.verb in ("", *VERBS), self.verb


@dataclass
class Request:
    """A request that was seen; its status is None until it is answered, which may be never."""

    method: str
    path: str
    query: str
    status: int | None = None
    key: str = ""

    @property
    def verb(self) -> str:
        return _verb(self.method, self.path, self.query)


class FaultProxy:
    """A `with` block in which `endpoint` leads to `upstream`, through the faults that are injected meanwhile."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.removeprefix("http://").rstrip("/")
        self._upstream_port = int(self._upstream.rpartition(":")[2])
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._ready: threading.Event = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault proxy", daemon=True)
        self.endpoint = ""
        self.injected = 0
        self.requests: list[Request] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def inject(self, *faults: Fault) -> None:
        """From now on, the first of the faults that matches a request hits it."""
        with self._lock:
            self._faults += faults

    def clear(self) -> None:
        """Forget the faults and the requests so far, and count from zero."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()
            self.injected = 0

    def count(self, verb: str = "", key_pattern: str = "") -> int:
        """How many requests of this kind were seen."""
        return sum(verb in ("", seen.verb) and bool(re.search(key_pattern, seen.key)) for seen in list(self.requests))

    async def _serve(self) -> None:
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=http1.PIECE)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._closed.wait()
        server.close()  # the connections that are left are cancelled by the loop's end

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await http1.read_head(reader):
                if head.get("expect") == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                if not await self._exchange(head, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            _reset(writer)
        except asyncio.CancelledError:  # the proxy closes; Python 3.11 would report a task that ends cancelled
            _reset(writer)
        finally:
            writer.close()

    async def _exchange(self, head: http1.Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection stays open after it."""
        seen = Request(head.method, head.path, head.target.partition("?")[2])
        with self._lock:
            self.requests.append(seen)
        body = await http1.read_body(reader, head) if _names_in_body(seen) else None
        seen.key = _key(seen.path, seen.query, body or b"")
        fault = self._take(seen)
        if fault is None:
            pieces = http1.pieces(reader, head) if body is None else _one(body)
            stays = await self._forward(seen, head, pieces, writer)
        else:
            body = await http1.read_body(reader, head) if body is None else body
            stays = await self._harm(fault, seen, head, body, writer)
        return stays and head.get("connection") != "close"

    def _take(self, seen: Request) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.verb not in ("", seen.verb) or not re.search(fault.key_pattern, seen.key) or fault.times == 0:
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                self.injected += 1
                return fault
        return None

    def _give_back(self, fault: Fault) -> None:
        with self._lock:
            self.injected -= 1
            if fault.times is not None:
                fault.times += 1

    async def _harm(
        self, fault: Fault, seen: Request, head: http1.Head, body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """A request that the fault hits, whose body has been read whole."""
        if fault.kind in _ERRORS:
            seen.status = int(fault.kind)
            writer.write(_error(fault.kind, seen))
            await writer.drain()
            return True
        if fault.kind == "reset":
            raise ConnectionResetError
        if fault.kind == "hang":
            await self._closed.wait()
            raise ConnectionResetError
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
            return await self._forward(seen, head, _one(body), writer)
        payload = _payload(head, body)
        if fault.kind in ("half_body", "flip_out") and not payload:
            self._give_back(fault)
            return await self._forward(seen, head, _one(body), writer)
        if fault.kind == "flip_out":
            return await self._forward(seen, head, _one(_flipped(body, payload)), writer)
        if fault.kind == "half_body":
            async with self._to_store() as (_, store):
                store.write(bytes(head.forwarded().having(transfer_encoding=None, content_length=str(len(body)))))
                store.write(body[: payload[len(payload) // 2]])
                await store.drain()
            raise ConnectionResetError
        answered, text = await http1.ask(self._upstream_port, head, body)
        if fault.kind == "lost_answer":
            raise ConnectionResetError
        if answered.status >= 300 or not text:
            self._give_back(fault)
        sent = text
        if answered.status < 300 and text:
            sent = _flipped(text, range(len(text))) if fault.kind == "flip_in" else text[: len(text) // 2]
        seen.status = answered.status
        if http1.has_body(head.method, answered.status):
            answered = answered.having(transfer_encoding=None, content_length=str(len(text)))
        writer.write(bytes(answered.forwarded()) + sent)
        await writer.drain()
        return len(sent) == len(text)

    async def _forward(
        self, seen: Request, head: http1.Head, body: AsyncIterator[bytes], writer: asyncio.StreamWriter
    ) -> bool:
        """A request passed on as it is, piece by piece, and its answer."""
        async with self._to_store() as (reader, store):
            chunked = head.get("transfer-encoding") == "chunked"
            # A store may answer, and close, before it has read all.
            with contextlib.suppress(ConnectionError):
                store.write(bytes(head.forwarded().having(connection="close")))
                await _copy(body, store, chunked=chunked)
            answered = await http1.read_head(reader)
            if answered is None:
                raise ConnectionResetError("the store closed the connection")
            seen.status = answered.status
            has_body = http1.has_body(head.method, answered.status)
            chunked = has_body and answered.get("transfer-encoding") == "chunked"
            stays = not has_body or chunked or answered.get("content-length") != ""
            shown = answered.forwarded() if stays else answered.having(connection="close")
            writer.write(bytes(self._as_mine(shown)))
            if has_body:
                await _copy(http1.pieces(reader, answered, to_close=True), writer, chunked=chunked)
            await writer.drain()
            return stays

    def _as_mine(self, head: http1.Head) -> http1.Head:
        """A resumable upload of GCS goes on where its first answer says: here."""
        mine = self.endpoint.removeprefix("http://")
        renamed = (
            (name, value.replace(self._upstream, mine) if name.lower() == "location" else value)
            for name, value in head.headers
        )
        return http1.Head(head.line, tuple(renamed))

    @contextlib.asynccontextmanager
    async def _to_store(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream_port, limit=http1.PIECE)
        try:
            yield reader, writer
        finally:
            writer.close()


def _verb(method: str, path: str, query: str) -> str:
    names = dict(item.partition("=")[::2] for item in query.split("&") if item)
    if _is_gcs(path):
        if path.startswith("/batch/") or method == "DELETE":
            return "delete"
        if method == "GET":
            if path.endswith("/o"):
                return "list"
            return "get" if names.get("alt") == "media" else "head"
        return "put"
    if method == "POST" and "delete" in names:
        return "delete"
    if method == "GET" and not path.strip("/").partition("/")[2]:
        return "list"
    return {"PUT": "put", "POST": "put", "GET": "get", "HEAD": "head", "DELETE": "delete"}.get(method, "")


def _key(path: str, query: str, body: bytes) -> str:
    names = {name: unquote(value.replace("+", " ")) for name, _, value in (q.partition("=") for q in query.split("&"))}
    if _is_gcs(path):
        if body:
            text = body.decode(errors="replace")
            found = re.findall(r"^DELETE \S+/o/(\S+)", text, re.M) or re.findall(r'"name": *"([^"]*)"', text)[:1]
            return "\n".join(unquote(key) for key in found)
        # The last one is what a copy writes.
        return (
            names.get("name")
            or names.get("prefix")
            or names.get("startOffset")
            or unquote(path.rpartition("/o/")[2] if "/o/" in path else "")
        )
    if "delete" in names:
        return "\n".join(unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode(errors="replace"), re.S))
    return unquote(path.strip("/").partition("/")[2]) or names.get("prefix", "")


def _names_in_body(seen: Request) -> bool:
    """Whether only the body says which objects a request is about."""
    if seen.path.startswith("/upload/"):
        return _is_gcs(seen.path) and "name=" not in seen.query and "upload_id=" not in seen.query
    return seen.verb == "delete" and seen.method == "POST"


def _is_gcs(path: str) -> bool:
    return re.match(r"/(upload/|download/|batch/)?storage/v1(/|$)", path) is not None


def _payload(head: http1.Head, body: bytes) -> range:
    """Where in the body the object's own bytes are."""
    if "aws-chunked" in head.get("content-encoding") or head.get("x-amz-content-sha256").startswith("streaming-"):
        size, _, rest = body.partition(b"\r\n")
        start = len(body) - len(rest)
        return range(start, start + int(size.partition(b";")[0], 16))
    if head.get("content-type").startswith("multipart/related"):
        return http1.parts(body)[1]
    return range(len(body))


def _flipped(body: bytes, within: range) -> bytes:
    changed = bytearray(body)
    changed[within[len(within) // 2]] ^= 0x10
    return bytes(changed)


def _error(status: str, seen: Request) -> bytes:
    code, reason = _ERRORS[status]
    extra = {"retry_after": "1"} if status == "429" else {}
    if _is_gcs(seen.path):
        error = {"code": int(status), "message": code, "errors": [{"message": code, "reason": reason}]}
        body, kind = json.dumps({"error": error}).encode(), "application/json"
    else:
        code = "NoSuchBucket" if status == "404" and seen.verb == "list" else code
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>Injected {code}</Message>'
            f"<Resource>{escape(seen.path)}</Resource><RequestId>injected</RequestId></Error>"
        ).encode()
        kind = "application/xml"
    whole = http1.answer(int(status), body, kind, **extra)
    return whole[: -len(body)] if seen.method == "HEAD" else whole


async def _one(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in itertools.takewhile(lambda start: start < len(body), itertools.count(0, http1.PIECE)):
        yield bytes(view[start : start + http1.PIECE])


async def _copy(body: AsyncIterator[bytes], writer: asyncio.StreamWriter, *, chunked: bool) -> None:
    async for piece in body:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        await writer.drain()
    if chunked:
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once with RST, whatever is still to be sent."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
