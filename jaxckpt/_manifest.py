"""The records of a checkpoint, format version 1, and their JSON. Pure.

`manifest.json` is the commit record: it names the data directory, the tree, the
leaves and the index files with their sizes and hashes. An index file lists the
pieces that one process wrote: which box of which leaf lies where, and the xxh3-128
hash of every block of it. The manifest carries the hash of its own body, so every
byte of a checkpoint is checked by something.

Source: design.md, section 4 ("On disk"), in this project's shared documents.
"""

# msgspec hands `frozen` down, which the checker does not know.
# pyright: reportGeneralTypeIssues=false
import base64
import math
from functools import cache
from typing import Annotated, Any, Literal

import ml_dtypes
import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct

from jaxckpt._errors import CorruptCheckpointError

FORMAT_VERSION = 1

_BYTES, _FLOAT = "__bytes__", "__float__"

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Not `$`, which also accepts a line feed after the end.
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Attempt = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
# A name is a relative path of harmless components: it cannot climb out of the directory it is used in.
_COMPONENT = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9_.%~-]+"
Name = Annotated[str, Meta(pattern=rf"^{_COMPONENT}(?:/{_COMPONENT})*\Z", max_length=1000)]
Box = Annotated[tuple[Natural, ...], Meta(max_length=64)]  # NumPy has no arrays of more axes

_CORE_DTYPES = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base of all records: immutable, typed when decoded, strict about what it holds.

    They refer to nothing that refers to them, so the collector need not look at them: with
    ten thousands of leaves it would stop every thread for a tenth of a second.
    """


class Node(Record):
    """One inner node of the tree. `children` holds leaf numbers, or ~n for node n before it."""

    type: Literal["dict", "list", "tuple", "namedtuple", "none", "object"]
    children: list[int] = []
    keys: list[Any] = []
    """Of a dict: its keys, types kept, a tuple as a JSON list. Of a namedtuple or object: field names."""
    name: str | None = None
    """Of a namedtuple or object: the name of its class, for people; nothing is imported by it."""


class ShardingInfo(Record):
    """How an array was spread over devices when it was saved: for people, not needed to restore."""

    type: str
    devices: Natural
    memory_kind: str | None = None
    mesh: dict[str, Natural] = {}
    spec: list[str | list[str] | None] = []

    def __str__(self) -> str:
        if not self.mesh:
            return f"{self.type} on {self.devices}"
        axes = ", ".join(f"{name}:{size}" for name, size in self.mesh.items())
        parts = ", ".join("+".join(p) if isinstance(p, list) else p or "-" for p in self.spec)
        return f"({parts}) over {axes}"


class Value(Record):
    """A Python value, spelled so that it comes back exactly: floats and ints in hexadecimal."""

    type: Literal["bool", "int", "float", "complex", "str"]
    text: str

    @classmethod
    def of(cls, value: bool | int | float | complex | str) -> "Value":
        match value:
            case bool():
                return cls(type="bool", text=str(value))
            case int():
                return cls(type="int", text=hex(value))
            case float():
                return cls(type="float", text=value.hex())
            case complex():
                return cls(type="complex", text=f"{value.real.hex()} {value.imag.hex()}")
            case _:
                return cls(type="str", text=value)

    def get(self) -> bool | int | float | complex | str:
        match self.type:
            case "bool":
                return self.text == "True"
            case "int":
                return int(self.text, 16)
            case "float":
                return float.fromhex(self.text)
            case "complex":
                real, imag = self.text.split()
                return complex(float.fromhex(real), float.fromhex(imag))
            case "str":
                return self.text

    def check(self) -> None:
        """Raise ValueError where the text is not of a value."""
        try:
            self.get()
        except (ValueError, OverflowError):
            raise ValueError(f"{self.text[:40]!r} is no {self.type}") from None


class Leaf(Record):
    """One leaf of the saved tree.

    `kind` says what it was: `array` a jax.Array, `numpy` a numpy array, `scalar` a
    numpy scalar, `key` a typed PRNG key array (stored as its key data, `impl` names
    its implementation), `value` a Python value. `shape` and `dtype` are those of the
    stored array. `chunk` is the chunk of its Zarr array, None where it is packed.
    """

    name: Name
    kind: Literal["array", "numpy", "scalar", "key", "value"]
    shape: Box = ()
    dtype: str = ""
    chunk: Box | None = None
    sharding: ShardingInfo | None = None
    impl: str | None = None
    value: Value | None = None

    def __post_init__(self) -> None:
        """Check what the types of the fields do not say. The decoder makes its own error of a ValueError."""
        if (self.kind == "value") != (self.value is not None):
            raise ValueError(f"a leaf of kind {self.kind} {'without' if self.value is None else 'with'} a value")
        if self.value is not None:
            self.value.check()
        elif math.prod(n or 1 for n in self.shape) * dtype_named(self.dtype).itemsize >= 2**63:
            raise ValueError(f"no array is of shape {self.shape}")

    @property
    def nbytes(self) -> int:
        """Bytes of the array, uncompressed and one element a whole number of bytes."""
        if self.kind == "value":
            return 0
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


class File(Record):
    """A data file: its path under the data directory and its exact size in bytes.

    `hash` is that of the whole file where no piece covers it (`zarr.json`).
    """

    name: Name
    nbytes: Natural
    hash: Hash | None = None


class Piece(Record, array_like=True):
    """A box of a leaf and where its bytes are: C order, from `offset` of file number `file`.

    `hashes` are the xxh3-128 of its blocks, in order (see `_shards.blocks`).
    """

    leaf: Natural
    start: Box
    shape: Box
    file: Natural
    offset: Natural
    hashes: list[Hash]


class Index(Record):
    """What one process wrote."""

    files: list[File]
    pieces: list[Piece]


class IndexFile(Record):
    """The size and hash of an index file, held by the manifest.

    `written_nbytes` are the bytes of array data that the process which wrote it has written.
    """

    name: Name
    nbytes: Natural
    hash: Hash
    written_nbytes: Natural = 0


class Timings(Record):
    """Seconds since the save began: when everything was captured, and when all data were written."""

    captured_seconds: float = 0.0
    written_seconds: float = 0.0


class Manifest(Record):
    """The commit record: a checkpoint exists exactly when one names its data."""

    format_version: int
    attempt: Attempt
    created: str
    versions: dict[str, str]
    tree: list[Node]
    leaves: list[Leaf]
    indexes: list[IndexFile]
    timings: Timings
    metadata: dict[str, Any] = {}
    """What the caller wants to keep beside the tree, as `to_json` spells it."""
    local_data: list[Any] = []
    """The same, of each process; empty where none has any."""

    @property
    def data(self) -> str:
        """The data directory, beside the manifest."""
        return f"d-{self.attempt}"


class _Envelope(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    xxh3_128: Hash
    manifest: msgspec.Raw


class _Version(Struct):
    format_version: int


class ArrayAttributes(Record):
    """What `async_serialize` keeps in an array's own `zarr.json`, its commit, under the attribute `jaxckpt`."""

    format_version: int
    attempt: Attempt


class ArrayIndex(Record):
    """What one process wrote of an array of `async_serialize`: the file `index-<process>.json` beside the chunks."""

    attempt: Attempt
    shape: Box
    dtype: str
    files: list[File]
    pieces: list[Piece]


class _ArrayEnvelope(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    xxh3_128: Hash
    index: msgspec.Raw


def encode_array_index(index: ArrayIndex) -> bytes:
    body = msgspec.json.encode(index)
    return msgspec.json.encode(_ArrayEnvelope(xxh3_128=digest(body), index=msgspec.Raw(body)))


def decode_array_index(data: bytes, where: str) -> ArrayIndex:
    """The index in `data`, which was read from `where`, its hash checked.

    Raises:
        CorruptCheckpointError: It is not an index, or was altered.
    """
    try:
        envelope = msgspec.json.decode(data, type=_ArrayEnvelope)
        if digest(bytes(envelope.index)) != envelope.xxh3_128:
            raise CorruptCheckpointError(f"{where}: the index does not match its hash; it was altered or cut")
        return msgspec.json.decode(envelope.index, type=ArrayIndex)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where}: not the index of an array ({error})") from error


def encode_manifest(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(xxh3_128=digest(body), manifest=msgspec.Raw(body))
    return msgspec.json.encode(envelope)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in `data`, which was read from `where`, its hash checked.

    Raises:
        CorruptCheckpointError: It is not a manifest, was altered, or is of a format
            version that this jaxckpt does not know.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = memoryview(envelope.manifest)
        if digest(body) != envelope.xxh3_128:
            raise CorruptCheckpointError(f"{where}: the manifest does not match its hash; it was altered or cut")
        version = msgspec.json.decode(body, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise CorruptCheckpointError(
                f"{where}: format version {version}, but this jaxckpt reads "
                f"version {FORMAT_VERSION}; install a newer one"
            )
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where}: not a jaxckpt manifest ({error})") from error
    if len({file.name for file in manifest.indexes}) != len(manifest.indexes):
        raise CorruptCheckpointError(f"{where}: an index file is listed twice")
    return manifest


def to_json(value: Any, where: str) -> Any:
    """`value` as JSON keeps it exactly: bytes and the floats that JSON lacks are tagged, a tuple becomes a list.

    Raises:
        TypeError: It is of another type; names the place.
    """
    match value:
        case dict():
            if bad := [key for key in value if type(key) is not str]:
                raise TypeError(f"{where} has the key {bad[0]!r}; expected str keys, as in JSON")
            if value.keys() & {_BYTES, _FLOAT}:
                raise TypeError(f"{where} has a key {_BYTES!r} or {_FLOAT!r}, which mark bytes and floats; rename it")
            return {key: to_json(part, f"{where}[{key!r}]") for key, part in value.items()}
        case list() | tuple():
            return [to_json(part, f"{where}[{at}]") for at, part in enumerate(value)]
        case bytes():
            return {_BYTES: base64.b64encode(value).decode()}
        case float() if not math.isfinite(value):
            return {_FLOAT: str(value)}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(
                f"{where} is of type {type(value).__qualname__}; expected what JSON has, or bytes. "
                "Convert numbers with float() or int(), and put arrays into the tree"
            )


def from_json(value: Any) -> Any:
    """The inverse of `to_json`.

    Raises:
        ValueError, TypeError, RecursionError: `to_json` never made that.
    """
    match value:
        case dict() if value.keys() == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        case dict() if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        case dict():
            return {key: from_json(part) for key, part in value.items()}
        case list():
            return [from_json(part) for part in value]
        case _:
            return value


def encode_index(index: Index) -> bytes:
    return msgspec.json.encode(index)


def decode_index(data: bytes, expected: IndexFile, where: str) -> Index:
    """The index in `data`, checked against the size and hash that the manifest holds for it."""
    if len(data) != expected.nbytes or digest(data) != expected.hash:
        raise CorruptCheckpointError(f"{where}: the index file does not match the manifest; it was altered or cut")
    try:
        return msgspec.json.decode(data, type=Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where}: not a jaxckpt index ({error})") from error


def digest(data: Any) -> str:
    """The xxh3-128 hash of a buffer, as hexadecimal. Releases the GIL for large data."""
    return xxhash.xxh3_128_hexdigest(data)


@cache
def dtype_named(name: str) -> np.dtype[Any]:
    """The numpy dtype that JAX calls `name`.

    Raises:
        ValueError: No such dtype; nothing else is looked up by the name.
    """
    if name in _CORE_DTYPES:
        return np.dtype(name)
    scalar = getattr(ml_dtypes, name, None)
    if not (isinstance(scalar, type) and issubclass(scalar, np.generic)):
        raise ValueError(f"{name!r} is not a dtype that jaxckpt stores")
    return np.dtype(scalar)


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """The name of `dtype`; numpy builds it anew, slowly, each time that it is asked."""
    return dtype.name


@cache
def is_stored_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of `dtype` can be stored: native byte order and known by name."""
    try:
        return dtype_named(dtype.name) == dtype
    except ValueError:
        return False


@cache
def zarr_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the Zarr array that holds `dtype`.

    The core types of Zarr v3 are kept. Others (bfloat16, fp8, int4 ...), which readers
    disagree about, are held bit for bit as unsigned integers of the same width.
    """
    return dtype if dtype.name in _CORE_DTYPES else np.dtype(f"uint{8 * dtype.itemsize}")
