"""What the tests of hostile input run in processes of their own: opening what somebody forged, watched and limited."""

import asyncio
import collections
import copy
import gc
import os
import pickle
import random
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from click.testing import CliRunner
from jax.sharding import SingleDeviceSharding

import jaxckpt
from jaxckpt import (
    CheckpointError,
    RestoreOptions,
    _arrays,
    _cli,
    _commit,
    _info,
    _local,
    _manifest,
    _reader,
    _tree,
)

SLACK_BYTES = 64 << 20
NET_BYTES = 512 << 20
"""Above what is allowed, before the system itself says no: stacks of threads and allocators reserve that much."""

_OURS = (os.path.dirname(jaxckpt.__file__), os.path.dirname(__file__))  # JAX reads sources for its errors
_PYTHON = tuple({os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, "/proc", "/sys", *_OURS)})
_NAMEDTUPLE = re.compile(r"lambda _cls, ([\w, ]*): _tuple_new\(_cls, \(([\w, ]*)\)\)")
_FORBIDDEN = ("socket.", "pickle.", "marshal.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork")
_FORBIDDEN += ("ctypes.", "shutil.", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink")
_FORBIDDEN += ("os.truncate", "os.chmod", "urllib.", "tempfile.", "webbrowser.")


class Watch:
    """Records what the process does that opening a checkpoint must not, while `root` is set."""

    def __init__(self) -> None:
        self.root = ""
        self.breaches: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.root or event == "socket.__new__":  # an event loop wakes itself through a pair of them
            return
        allowed = {
            "open": self._may_open,
            "os.listdir": self._may_open,
            "os.scandir": self._may_open,
            "compile": self._may_compile,
            "import": self._may_import,
        }.get(event, lambda *_: not event.startswith(_FORBIDDEN))
        if not allowed(*arguments):
            self.breaches.append(f"{event} {arguments}"[:200])

    def _may_open(self, path: Any, mode: Any = None, flags: int = 0) -> bool:
        if isinstance(path, int):
            return True  # opened already
        path = os.fsdecode(path)
        if not os.path.isabs(path):  # of the directory that was opened before: one component, links not followed
            return "/" not in path and path not in ("", ".", "..") and bool(flags & os.O_NOFOLLOW)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return False
        path = os.path.realpath(path)
        return path == self.root or path.startswith((f"{self.root}/", *_PYTHON))

    def _may_import(self, name: str, *rest: Any) -> bool:
        return name.partition(".")[0] not in ("pickle", "cloudpickle", "dill", "joblib")

    def _may_compile(self, source: Any, filename: Any) -> bool:
        if source is None or os.fsdecode(filename).startswith(_PYTHON):
            return True
        text = source.decode() if isinstance(source, bytes) else str(source)
        # How Python's own namedtuple makes its constructor; the names in it are identifiers.
        return _NAMEDTUPLE.fullmatch(text) is not None


def examine(commands: Connection, mutant: str) -> None:
    """For each path that comes in, open what is there in every way, and send back how each one ended."""
    watch, warm = Watch(), False
    while True:
        command = commands.recv()
        if command is None:
            return
        path, names = command
        if not warm:
            warm_up(path, names)
            MUTANTS[mutant]()
            warm = True
        for name in names:
            commands.send((name, *measured(watch, path, OPERATIONS[name])))
        commands.send(None)


def warm_up(path: str, names: Iterable[str]) -> None:
    """Import and compile what is imported and compiled once."""
    for name in names:
        error_of(OPERATIONS[name], path)
    gc.collect()
    gc.freeze()  # to look through all of JAX for garbage takes longer than what is measured


def measured(watch: Watch, path: str, operation: Callable[[str], Any]) -> tuple[str, float, int, list[str]]:
    """How `operation` ended, the processor's seconds, the most memory it held, and its breaches."""
    gc.collect()
    with memory_limit(10 * real_bytes(path) + SLACK_BYTES + NET_BYTES):
        before = reset_peak()
        began = time.process_time()
        watch.breaches, watch.root = [], os.path.realpath(path)
        error = error_of(operation, path)
        watch.root = ""
        seconds = time.process_time() - began
        nbytes = memory("VmHWM") - before
    return described(error), seconds, nbytes, watch.breaches


def error_of(operation: Callable[[str], Any], path: str) -> BaseException | None:
    try:
        operation(path)
    except BaseException as error:  # noqa: BLE001, what is no error of ours is a fault
        return error
    return None


def described(error: BaseException | None) -> str:
    """`ok`, the class of an error that is typed, or all of one that is not."""
    if error is None or isinstance(error, CheckpointError):
        assert error is None or str(error)
        return "ok" if error is None else type(error).__name__
    return "fault: " + "".join(traceback.format_exception(error, limit=-6))


class memory_limit:  # noqa: N801, it is used as a statement
    """The data segment may grow by so many bytes for the length of the block."""

    def __init__(self, nbytes: int) -> None:
        self._limit = memory("VmData") + nbytes

    def __enter__(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._limit, resource.RLIM_INFINITY))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def reset_peak() -> int:
    """Forget the peak of the resident memory, and return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def real_bytes(path: str) -> int:
    """What the files at `path` really take: holes count nothing."""
    return sum(min(stat.st_size, stat.st_blocks * 512) for stat in stats_of(path))


def apparent_bytes(path: str) -> int:
    return sum(stat.st_size for stat in stats_of(path))


def stats_of(path: str) -> list[os.stat_result]:
    return [os.lstat(os.path.join(directory, name)) for directory, _, names in os.walk(path) for name in names]


# What the watch must notice


def follow_links() -> None:
    _local._open_below = lambda top, name: os.open(os.path.join(top, name), os.O_RDONLY)


def believe_records() -> None:
    _reader.check = lambda *_: None
    _reader.check_files = lambda *_: None


def unpickle() -> None:
    _commit.decode_index = lambda data, *_: pickle.loads(data)


def say_nothing() -> None:
    _tree.paths = lambda tree, count, where: [()] * count


MUTANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "follows links": follow_links,
    "believes records": believe_records,
    "unpickles": unpickle,
    "does not look at trees": say_nothing,
}


# What is done with a checkpoint


def like() -> Any:
    """What the checkpoint that is forged was saved from, as `like`."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, plain_tree())


def plain_tree() -> dict[str, Any]:
    return {
        "large": np.arange(48, dtype=np.float32).reshape(8, 6),
        "small": {"a": np.arange(5, dtype=np.uint8), "b": [np.full(3, 1.5, np.float16), 7]},
        "text": "text",
    }


def describe(path: str) -> None:
    info = jaxckpt.describe(path)
    assert info.nbytes >= 0
    assert len(info.leaves) >= 0
    _ = info.tree


def ls(path: str) -> None:
    result = CliRunner().invoke(_cli.cli, ["ls", path])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code:
        raise jaxckpt.CorruptCheckpointError(result.output)


def restore(path: str, **options: Any) -> None:
    jaxckpt.restore(path, options=RestoreOptions(timeout_seconds=60, **options))


def restore_like(path: str) -> None:
    jaxckpt.restore(path, like(), options=RestoreOptions(timeout_seconds=60, cast=True))


def deserialize(path: str) -> None:
    sharding = SingleDeviceSharding(jax.devices()[0])
    asyncio.run(jaxckpt.async_deserialize([path], [sharding], options=RestoreOptions(timeout_seconds=60)))


OPERATIONS: dict[str, Callable[[str], Any]] = {
    "describe": describe,
    "ls": ls,
    "restore": restore,
    "restore, not verified": lambda path: restore(path, verify=False),
    "restore, mapped": lambda path: restore(path, memory_map=True),
    "restore like": restore_like,
    "verify": jaxckpt.verify,
    "deserialize": deserialize,
}


CHECKPOINT = [name for name in OPERATIONS if name != "deserialize"]
ARRAY = ["deserialize"]


class Forged:
    """A checkpoint whose records may be changed at will; `write` makes their hashes right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        envelope = msgspec.json.decode((path / "manifest.json").read_bytes())
        self.manifest: dict[str, Any] = envelope["manifest"]
        self.data = path / f"d-{self.manifest['attempt']}"
        self.index: dict[str, Any] = msgspec.json.decode((self.data / "index-0.json").read_bytes())
        self._indexes = [dict(record) for record in self.manifest["indexes"]]

    def leaf(self, name: str) -> dict[str, Any]:
        return next(leaf for leaf in self.manifest["leaves"] if leaf["name"] == name)

    def pieces(self, name: str) -> list[list[Any]]:
        number = self.manifest["leaves"].index(self.leaf(name))
        return [piece for piece in self.index["pieces"] if piece[0] == number]

    def file(self, name: str) -> Path:
        """The file of the first piece of a leaf."""
        return self.data / self.index["files"][self.pieces(name)[0][3]]["name"]

    def write(self, body: bytes | None = None, index: bytes | None = None) -> None:
        """Write the records, or the bytes given in their place, as a forger does who can compute hashes."""
        encoded = msgspec.json.encode(self.index) if index is None else index
        if (self.data / "index-0.json").is_file():
            (self.data / "index-0.json").write_bytes(encoded)
        if self.manifest.get("indexes") == self._indexes:
            record = {"nbytes": len(encoded), "hash": _manifest.digest(encoded)}
            self._indexes = [self._indexes[0] | record]
            self.manifest["indexes"] = [dict(record) for record in self._indexes]
        body = msgspec.json.encode(self.manifest) if body is None else body
        (self.path / "manifest.json").write_bytes(envelope_of(body))


def envelope_of(body: bytes) -> bytes:
    return b'{"xxh3_128":"' + _manifest.digest(body).encode() + b'","manifest":' + body + b"}"


# Fuzzing

TOKENS = [
    *(b"-1", b"0", b"1e999", b"1.5", b"9" * 30, b"9223372036854775807", b"18446744073709551616", b"NaN", b"null"),
    *(
        b"true",
        b"[]",
        b"{}",
        b'""',
        b'"\\ud800"',
        b'"\\u0000"',
        b'"../x"',
        b"[[",
        b"]]",
        b"{{",
        b",,",
        b":",
        b'"',
        b"\\",
    ),
]
NASTY: list[Any] = [
    *(-1, 0, 1, 2, 3, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, True, False, None),
    *(
        "",
        "x",
        "..",
        "../x",
        "/",
        "a\0b",
        "é",
        "x" * 1000,
        "0" * 32,
        "bfloat16",
        "int4",
        "object",
        "float64",
        "0x1p9999",
    ),
    *([], {}, [[]], [{}], [0], [-1], [0] * 65, [2**62, 2**62], {"a": None}, ["x"], [None], {"type": "none"}),
    *("dict", "list", "tuple", "namedtuple", "none", "key", "value", "scalar", "numpy", "array", "str", "complex"),
]


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes of `data` flipped, lost, doubled, moved or replaced."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        to = min(len(out), at + rng.choice((1, 1, 2, 8, 40)))
        match rng.randrange(6):
            case 0:
                out[at:to] = bytes(byte ^ (1 << rng.randrange(8)) for byte in out[at:to])
            case 1:
                del out[at:to]
            case 2:
                out[at:at] = out[at:to] * rng.choice((1, 2, 50))
            case 3:
                out[at:to] = rng.choice(TOKENS)
            case 4:
                out[at:at] = rng.choice(TOKENS)
            case _:
                out[at:to] = rng.randbytes(to - at)
    return bytes(out)


def mutated_json(rng: random.Random, data: bytes) -> bytes:
    """A few values of a JSON document lost, doubled, moved or replaced; still JSON."""
    document = [msgspec.json.decode(data)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        slots = list(slots_of(document))
        holder, key = rng.choice(slots)
        match rng.randrange(6):
            case 0 if holder is not document:
                del holder[key]
            case 1 if isinstance(holder, list) and holder is not document:
                holder.insert(key, holder[key])
            case 2:
                other, at = rng.choice(slots)
                holder[key] = copy.deepcopy(other[at])
            case 3 if type(holder[key]) is int:
                holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, ~holder[key], holder[key] * 2**32))
            case _:
                holder[key] = copy.deepcopy(rng.choice(NASTY))
    return msgspec.json.encode(document[0]) if document else b""


def slots_of(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Where every value of a document is."""
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, key
        if isinstance(value, dict | list):
            yield from slots_of(value)


class Target:
    """Records that are mutated: decoded and looked through each time, and now and then opened in every way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pristine(self) -> bytes:
        raise NotImplementedError

    def decode(self, data: bytes) -> None:
        raise NotImplementedError

    def place(self, data: bytes) -> None:
        raise NotImplementedError

    def open(self, data: bytes) -> None:
        errors = [error_of(operation, str(self.path)) for operation in (restore, restore_like, jaxckpt.verify)]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, CheckpointError)):
            raise error


class ManifestTarget(Target):
    def pristine(self) -> bytes:
        return msgspec.json.encode(Forged(self.path).manifest)

    def decode(self, data: bytes) -> None:
        manifest = _manifest.decode_manifest(envelope_of(data), "manifest.json")
        found = _info.info(_local.LocalLocation("/nowhere"), manifest)
        assert found.nbytes >= 0
        for leaf in found.leaves:
            str(leaf.sharding)
        _ = found.tree

    def place(self, data: bytes) -> None:
        (self.path / "manifest.json").write_bytes(envelope_of(data))


class IndexTarget(Target):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._forged = Forged(path)
        manifest = _manifest.decode_manifest((path / "manifest.json").read_bytes(), "")
        self._leaves = [(number, leaf) for number, leaf in enumerate(manifest.leaves) if leaf.kind != "value"]

    def pristine(self) -> bytes:
        return msgspec.json.encode(self._forged.index)

    def decode(self, data: bytes) -> None:
        expected = _manifest.IndexFile(name="index-0.json", nbytes=len(data), hash=_manifest.digest(data))
        index = _manifest.decode_index(data, expected, "index-0.json")
        pieces = _reader.by_leaf([(index, _local.LocalLocation("/nowhere"))], "index-0.json")
        taken: dict[str, int] = {}
        for number, leaf in self._leaves:
            _reader.check(leaf.name, leaf.shape, _manifest.dtype_named(leaf.dtype), pieces.get(number, ()), taken)

    def place(self, data: bytes) -> None:
        self._forged.write(index=data)


class ArrayIndexTarget(Target):
    """The index of an array of its own."""

    def pristine(self) -> bytes:
        return msgspec.json.encode(msgspec.json.decode((self.path / "index-0.json").read_bytes())["index"])

    def place(self, data: bytes) -> None:
        envelope = b'{"xxh3_128":"' + _manifest.digest(data).encode() + b'","index":' + data + b"}"
        (self.path / "index-0.json").write_bytes(envelope)

    def decode(self, data: bytes) -> None:
        self.place(data)
        location = _local.LocalLocation(str(self.path))
        leaf, indexes = _arrays._read_array_metadata(location)
        pieces = _reader.by_leaf([(index, location) for index in indexes], str(location))[0]
        _reader.check(leaf.name, leaf.shape, _manifest.dtype_named(leaf.dtype), pieces, {})

    def open(self, data: bytes) -> None:
        deserialize(str(self.path))


class ZarrTarget(ArrayIndexTarget):
    """The `zarr.json` of an array of its own; no hash protects it."""

    def pristine(self) -> bytes:
        return (self.path / "zarr.json").read_bytes()

    def place(self, data: bytes) -> None:
        (self.path / "zarr.json").write_bytes(data)


def fuzz(results: Connection, kind: type[Target], path: Path, seed: int, inputs: int, opened: int, mutant: str) -> None:
    """Send how `inputs` mutants of a record end, every now and then, of which about `opened` are opened in full."""
    warm_up(str(path), OPERATIONS)
    MUTANTS[mutant]()
    target, rng, watch = kind(path), random.Random(seed), Watch()
    pristine, tally = target.pristine(), collections.Counter[str]()
    with memory_limit(SLACK_BYTES + 20 * len(pristine) + NET_BYTES):
        before = reset_peak()
        for number in range(inputs):
            data = rng.choice((mutated_bytes, mutated_json))(rng, pristine)
            steps = [target.decode]
            if rng.random() * inputs < opened:
                target.place(data)
                steps.append(target.open)
            for step in steps:
                began = time.process_time()
                watch.root = os.path.realpath(path) if step == target.open else ""
                error = error_of(step, data)  # pyright: ignore[reportArgumentType]
                watch.root = ""
                outcome = described(error)
                if outcome.startswith("fault") or time.process_time() - began > 5 or watch.breaches:
                    results.send(f"{outcome} {watch.breaches} of {kind.__name__} input {number}: {data[:3000]!r}")
                    watch.breaches = []
                tally[f"{step.__name__}: {outcome.partition(':')[0]}"] += 1
            if number % 1000 == 0:
                results.send(None)
        nbytes = memory("VmHWM") - before
    results.send((tally, nbytes))


# Names

NAMES = [
    *("__metadata__", "zarr.json", "c/0", "c.0", "c", "arrays", "packs/0-0", "index-0.json", "manifest.json"),
    *("x.__lock", "../../x", "..", ".", "", "/", "/etc/x", "a//b", "a/", "~/x", "C:\\x", "s3://bucket/x", "file:///x"),
    *("A", "a", "\u00e9", "e\u0301", "\u212b", "\u00c5", "\ufb01", "fi", "\u0130", "i", "\u017f", "s", "ß", "ss"),
    *("\0", "a\0b", "\n", "a\nb", "\r", "\t", "\x1b[2J", "\u202e", "\u200b", "\ufeff", "\U0001f680", "\x7f", "\u2028"),
    *("%2F", "%2f", "%", "%00", "*", "?", "$HOME", "`id`", "$(id)", ";", "|", "&", "-rf", "'", '"', "#", "nul.txt"),
    *("x" * 255, "x" * 256, "x" * 5000, "é" * 2500, "../" * 1600 + "x", "/" * 5000, "a/b" * 1000, "." * 300, "con"),
]


def tree_of_names() -> dict[str, Any]:
    """Every hostile name as a key, alone and below others, over arrays with files of their own."""
    found: dict[str, Any] = {name: np.array([number]) for number, name in enumerate(NAMES)}
    found["below"] = {name: {name: np.array([-number])} for number, name in enumerate(NAMES)}
    deep: Any = np.array([7])
    for name in (NAMES * 8)[:450]:
        deep = {name: deep}
    return found | {"deep": deep}


def save_names(path: str) -> None:
    jaxckpt.save(path, tree_of_names(), options=jaxckpt.SaveOptions(pack_below_bytes=0))
