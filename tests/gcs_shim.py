"""Preconditions in front of fake-gcs-server, which ignores them for the uploads that TensorStore makes.

Enforces ifGenerationMatch of uploads, deletes and reads (412) and ifGenerationNotMatch of reads (304). Requests that
change an object, or depend on its generation, go one after the other for each object; all others pass at once.
"""

import asyncio
import contextlib
import json
import sys
from collections import defaultdict
from urllib.parse import quote, unquote

import http1

_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
_resumable: dict[str, tuple[str, str | None]] = {}  # upload id -> the object's path and the generation it must have


def _object(head: http1.Head, body: bytes) -> str | None:
    """The path that answers with the metadata of the request's object, or None where it names no single object."""
    query, path = head.query, head.path
    if path.startswith("/upload/"):
        name = query.get("name")
        if name is None and query.get("uploadType") == "resumable" and body:
            name = json.loads(body).get("name")
        if name is None and query.get("uploadType") == "multipart":
            name = json.loads(body[(part := http1.parts(body)[0]).start : part.stop])["name"]
        return f"{path.removeprefix('/upload')}/{quote(name, safe='')}" if name else None
    path = path.removeprefix("/download")
    return path if "/o/" in path and head.method in ("GET", "DELETE") else None


async def _generation(port: int, path: str) -> str:
    """The object's generation, "0" where there is no object."""
    found, body = await http1.ask(port, http1.Head(f"GET {path} HTTP/1.1", (("host", "127.0.0.1"),)), b"")
    return str(json.loads(body)["generation"]) if found.status == 200 else "0"


async def _answer(port: int, head: http1.Head, body: bytes) -> bytes:
    query = head.query
    path, match = _object(head, body), query.get("ifGenerationMatch")
    if query.get("upload_id") in _resumable:
        path, match = _resumable[query["upload_id"]]
    no_match = query.get("ifGenerationNotMatch") if head.method == "GET" else None
    plain_read = head.method == "GET" and match is None and no_match is None
    async with contextlib.nullcontext() if path is None or plain_read else _locks[unquote(path)]:
        if path is not None and not plain_read and (match is not None or no_match is not None):
            generation = await _generation(port, path)
            if match is not None and generation != match:
                error = {
                    "error": {"code": 412, "message": "Precondition Failed", "errors": [{"reason": "conditionNotMet"}]}
                }
                return http1.answer(412, json.dumps(error).encode(), "application/json")
            if no_match is not None and generation == no_match:
                return bytes(http1.Head("HTTP/1.1 304 Not Modified", ()))
        answered, text = await http1.ask(port, head, body)
    if path is not None and query.get("uploadType") == "resumable":
        for name, value in answered.headers:
            if name.lower() == "location" and "upload_id=" in value:
                _resumable[value.partition("upload_id=")[2].partition("&")[0]] = path, match
    if not http1.has_body(head.method, answered.status):
        return bytes(answered.forwarded())
    return bytes(answered.forwarded().having(transfer_encoding=None, content_length=str(len(text)))) + text


async def _serve(upstream: int, port: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while head := await http1.read_head(reader):
                if head.get("expect") == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                writer.write(await _answer(upstream, head, await http1.read_body(reader, head)))
                await writer.drain()
                if head.get("connection") == "close":
                    return

    async with await asyncio.start_server(connected, "127.0.0.1", port, limit=http1.PIECE) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
