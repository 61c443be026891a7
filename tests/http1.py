"""HTTP/1.1 as the fault proxy and the GCS shim read and write it, over asyncio streams."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

PIECE = 1 << 18
_HOP = {"connection", "keep-alive", "proxy-connection", "expect"}


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request or an answer."""

    line: str
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str:
        """The header's value in lower case, or an empty string."""
        return next((value.lower() for key, value in self.headers if key.lower() == name), "")

    def having(self, **changed: str | None) -> "Head":
        """The same head with these headers set, or removed where the value is None."""
        names = {name.replace("_", "-"): value for name, value in changed.items()}
        kept = tuple(pair for pair in self.headers if pair[0].lower() not in names)
        return Head(self.line, kept + tuple((name, value) for name, value in names.items() if value is not None))

    def forwarded(self) -> "Head":
        """The same head without what concerns one connection only; everything that is signed stays as it came."""
        return Head(self.line, tuple(pair for pair in self.headers if pair[0].lower() not in _HOP))

    def __bytes__(self) -> bytes:
        lines = [self.line, *(f"{name}: {value}" for name, value in self.headers)]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")

    @property
    def method(self) -> str:
        return self.line.split(" ")[0]

    @property
    def target(self) -> str:
        return self.line.split(" ")[1]

    @property
    def path(self) -> str:
        """The path as it was sent, still quoted."""
        return urlsplit(f"//host{self.target}" if self.target.startswith("/") else self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    @property
    def status(self) -> int:
        return int(self.line.split(" ")[1])


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head, or None where the other side has closed the connection instead."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ConnectionResetError("closed within a head") from None
        return None
    line, *lines = text[:-4].split("\r\n")
    pairs = (item.partition(":") for item in lines)
    return Head(line, tuple((name, value.strip()) for name, _, value in pairs))


async def pieces(reader: asyncio.StreamReader, head: Head, *, to_close: bool = False) -> AsyncIterator[bytes]:
    """A body piece by piece, chunks decoded. `to_close` means that a body of unknown length lasts until the close."""
    if head.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            async for piece in _exactly(reader, size):
                yield piece
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
    elif length := head.get("content-length"):
        async for piece in _exactly(reader, int(length)):
            yield piece
    elif to_close:
        while piece := await reader.read(PIECE):
            yield piece


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, PIECE))
        if not piece:
            raise ConnectionResetError("closed within a body")
        size -= len(piece)
        yield piece


async def read_body(reader: asyncio.StreamReader, head: Head, *, to_close: bool = False) -> bytes:
    return b"".join([piece async for piece in pieces(reader, head, to_close=to_close)])


def parts(body: bytes) -> tuple[range, range]:
    """Where in a multipart upload to GCS the object's metadata are, and where its bytes; line ends differ by client."""
    first = re.compile(rb"\r?\n\r?\n").search(body)
    assert first is not None
    middle = re.compile(rb"\r?\n--[^\n]*\n(?:[^\r\n]+\r?\n)*\r?\n").search(body, first.end())
    assert middle is not None
    end = body.rindex(b"\n--", middle.end() - 1)
    return range(first.end(), middle.start()), range(middle.end(), end - (body[end - 1 : end] == b"\r"))


def has_body(method: str, status: int) -> bool:
    """Whether an answer has a body at all."""
    return method != "HEAD" and status >= 200 and status not in (204, 304)


def answer(status: int, body: bytes, content_type: str, **headers: str) -> bytes:
    """A whole answer."""
    pairs = (("content-type", content_type), ("content-length", str(len(body))), *headers.items())
    named = tuple((name.replace("_", "-"), value) for name, value in pairs)
    return bytes(Head(f"HTTP/1.1 {status} .", named)) + body


async def ask(port: int, head: Head, body: bytes) -> tuple[Head, bytes]:
    """One request over a connection of its own, with its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=PIECE)
    try:
        length = None if head.method in ("GET", "HEAD") and not body else str(len(body))
        head = head.forwarded().having(connection="close", transfer_encoding=None, content_length=length)
        writer.write(bytes(head) + body)
        await writer.drain()
        answered = await read_head(reader)
        if answered is None:
            raise ConnectionResetError("no answer")
        if not has_body(head.method, answered.status):
            return answered, b""
        return answered, await read_body(reader, answered, to_close=True)
    finally:
        writer.close()
