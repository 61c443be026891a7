"""The objects of a store below a prefix, and operations on them with the promises of a local directory.

An object store has no directories, no rename and no locks. What it has is a conditional
put, which is all that a commit needs; `Store.check` tries once whether it really has it.
Bytes and records go through TensorStore, listings and copies through fsspec.
"""

import contextlib
import datetime
import errno
import os
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import IO, Any, ClassVar, Protocol, TypeVar

import numpy as np

from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UnsettledCommitError,
)
from jaxckpt._stat import Stat
from jaxckpt._tensorstore import Context, Patience, Range, Values, is_transient, remote_context

T = TypeVar("T")

SCHEMES = ("s3", "gs", "memory")

_OPTIONS = {
    "s3": ("key", "secret", "token", "profile", "anon", "endpoint_url", "region", "retry_seconds", "single_writer"),
    "gs": ("anon", "endpoint_url", "retry_seconds", "single_writer"),
    "memory": (),
}
_FILE_SYSTEMS = {"s3": "s3", "gs": "gcs"}
_DEFAULT_REGION = "us-east-1"
_GCS_ENDPOINT = "TENSORSTORE_GCS_HTTP_URL"
_MOST_RECORD_BYTES = 1 << 30
_NO_BYTES: Range = (0, 0)
_IS_LINUX = sys.platform == "linux"

_locked: set[str] = set()
"""What this process writes at the moment, which `gc` leaves alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How to reach a store; what is not given comes from the environment.

    Attributes:
        key, secret, token: Of an access key. None: the default chain of the AWS tools.
        profile: Of the AWS configuration files.
        anon: Sign nothing.
        endpoint_url: Of a store that is not Amazon's or Google's own, `http://host:port`.
        region: Of the bucket.
        retry_seconds: How long a request is tried again that fails for a passing reason.
        single_writer: There is never more than one writer for a path, so that a store
            without conditional puts may be used.
    """

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    anon: bool = False
    endpoint_url: str | None = None
    region: str | None = None
    retry_seconds: float = 120.0
    single_writer: bool = False

    def __post_init__(self) -> None:
        if (self.key is None) != (self.secret is None):
            raise ValueError("storage_options has a key or a secret without the other")
        if not (isinstance(self.retry_seconds, int | float) and self.retry_seconds > 0):
            raise ValueError(f"retry_seconds is {self.retry_seconds!r}; expected more than 0 seconds")
        for name in ("anon", "single_writer"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False")


def parse(scheme: str, rest: str, given: Mapping[str, Any]) -> "ObjectLocation":
    """The objects that the URL `scheme://rest` names: a bucket and a prefix.

    Raises:
        ValueError: There is no bucket, a name that stores treat differently, or an unknown option.
    """
    names = rest.rstrip("/").split("/")
    if not names[0] or any(name in ("", ".", "..") for name in names):
        raise ValueError(f"{scheme}://{rest}: expected a bucket, then names without empty ones, '.' or '..' among them")
    unknown = sorted(given.keys() - set(_OPTIONS[scheme]))
    if unknown:
        known = ", ".join(_OPTIONS[scheme]) or "none"
        raise ValueError(f"{scheme}:// has no storage option {unknown[0]!r}; expected {known}")
    bucket, *prefix = names
    return ObjectLocation(_store(scheme, bucket, _completed(scheme, StorageOptions(**given))), "/".join(prefix))


def _completed(scheme: str, options: StorageOptions) -> StorageOptions:
    """With those options that TensorStore does not take from the environment by itself, but the AWS tools do."""
    given = {item.name: getattr(options, item.name) for item in fields(options)}
    match scheme:
        case "s3":
            names = {"endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "region": _REGIONS}
        case "gs":
            names = {"endpoint_url": ("STORAGE_EMULATOR_HOST", _GCS_ENDPOINT)}
        case _:
            names = {}
    for option, variables in names.items():
        given[option] = given[option] or next(filter(None, map(os.environ.get, variables)), None)
    return StorageOptions(**given)


_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


@cache
def _store(scheme: str, bucket: str, options: StorageOptions) -> "Store":
    return Store(scheme, bucket, options)


class Store:
    """One bucket, as this process reaches it. Nothing is asked of it before it is used.

    Attributes:
        url: `scheme://bucket/`.
        options: How to reach it.
    """

    def __init__(self, scheme: str, bucket: str, options: StorageOptions) -> None:
        self.url = f"{scheme}://{bucket}/"
        self.options = options
        self.scheme = scheme
        self.bucket = bucket
        self._lock = threading.RLock()
        self._opened: tuple[Context, Values, _Listing] | None = None
        self._checked = False

    @property
    def keeps_written_data(self) -> bool:
        """Whether what is written without a copy stays in use for ever."""
        return self.scheme == "memory"

    @property
    def shared(self) -> Context:
        return self._open()[0]

    @property
    def values(self) -> Values:
        return self._open()[1]

    @property
    def listing(self) -> "_Listing":
        return self._open()[2]

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """The objects below `prefix` in TensorStore's words."""
        path = f"{prefix}/" if prefix else ""
        match self.scheme:
            case "memory":
                return {"driver": "memory", "path": f"{self.bucket}/{path}"}
            case "gs":
                return {"driver": "gcs", "bucket": self.bucket, "path": path}
            case _:
                region = self.options.region or (_DEFAULT_REGION if self.options.endpoint_url else None)
                given = {"endpoint": self.options.endpoint_url, "aws_region": region}
                # Otherwise a put looks first, and so hides a store that ignores its condition.
                spec = {"driver": "s3", "bucket": self.bucket, "path": path, "use_conditional_write": True}
                return spec | {name: value for name, value in given.items() if value}

    def check(self, prefix: str) -> None:
        """Try, once a process, whether the store keeps what a commit relies on.

        Raises:
            StorageError: It does not; says what.
        """
        with self._lock:
            if not self._checked and self.scheme != "memory":
                # Of a name that `gc` knows, should we not come to delete it.
                _probe(self.values, f"{prefix}/.manifest.json.{uuid.uuid4().hex}".lstrip("/"), self)
            self._checked = True

    def _open(self) -> "tuple[Context, Values, _Listing]":
        with self._lock:
            if self._opened is None:
                shared = _memory() if self.scheme == "memory" else self._connect()
                values = Values(self.kvstore(""), shared, self.url, self.options.retry_seconds)
                in_memory = self.scheme == "memory"
                listing = _ValuesListing(values) if in_memory else _FileSystemListing(self._file_system(), self)
                self._opened = shared, values, listing
            return self._opened

    def _connect(self) -> Context:
        if self.scheme == "gs":
            endpoint = self.options.endpoint_url
            if endpoint and os.environ.setdefault(_GCS_ENDPOINT, endpoint) != endpoint:
                raise ValueError(f"{self.url}: TensorStore uses one endpoint for all of gs://, {_GCS_ENDPOINT}")
            return remote_context({})
        options = self.options
        if options.anon:
            credentials: dict[str, Any] = {"type": "anonymous"}
        elif options.key is not None:
            self._key_file = _key_file(options)  # read anew whenever an array is opened
            path = f"/dev/fd/{self._key_file.fileno()}"
            credentials = {"type": "profile", "profile": "jaxckpt", "credentials_file": path, "config_file": os.devnull}
        elif options.profile is not None:
            credentials = {"type": "profile", "profile": options.profile}
        else:
            credentials = {"type": "default"}
        return remote_context({"aws_credentials": credentials})

    def _file_system(self) -> Any:
        import fsspec  # by who lists object stores alone: its backends take their time

        options, arguments = self.options, {}
        if self.scheme == "s3":
            arguments = {
                "key": options.key,
                "secret": options.secret,
                "token": options.token,
                "profile": options.profile,
                "anon": options.anon,
                "client_kwargs": {"region_name": options.region or _DEFAULT_REGION},
                "config_kwargs": {"retries": {"max_attempts": 0}},
            }
        else:
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks by gRPC, which emulators lack
            arguments = {"project": "", "token": "anon" if options.anon else None}  # no bucket is made or looked for
        try:
            found = fsspec.filesystem(
                _FILE_SYSTEMS[self.scheme],
                endpoint_url=options.endpoint_url,
                use_listings_cache=False,
                skip_instance_cache=True,
                **arguments,
            )
            found.retries = 1  # of s3fs, beside those of its client
            return found
        except ImportError as error:
            raise StorageError(
                errno.ENOPKG,
                f"{self.scheme}:// needs another package; run: pip install 'jaxckpt[{self.scheme}]'",
                self.url,
            ) from error


@cache
def _memory() -> Context:
    return remote_context({})


def _key_file(options: StorageOptions) -> IO[str]:
    """An access key as a file, which is all that TensorStore takes one from; it has no name and stays in memory."""
    lines = [
        "[jaxckpt]",
        f"aws_access_key_id = {options.key}",
        f"aws_secret_access_key = {options.secret}",
        *([f"aws_session_token = {options.token}"] if options.token else []),
    ]
    file = os.fdopen(os.memfd_create("jaxckpt"), "w") if _IS_LINUX else tempfile.TemporaryFile("w")  # noqa: SIM115
    file.write("\n".join(lines))
    file.flush()
    return file


def _probe(values: Values, key: str, store: Store) -> None:
    first, second = b"jaxckpt probe 1", b"jaxckpt probe 2"
    where = f"{store.url}{key}"
    missing = values.read(key)[1]
    _ask(lambda: values.write_if(key, first, missing), where, store)
    try:
        found, generation = values.read(key)
        if found != first:
            raise _unfit(where, f"an object that was written is read as {found!r} right after")
        if not _has_ranges(values, key, first):
            raise _unfit(where, "a part of an object is not what was asked for")
        if store.options.single_writer:
            return
        if _ask(lambda: values.write_if(key, second, missing), where, store):
            raise _unfit(where, _IGNORES.format("If-None-Match"))
        values.write(key, second)
        if _ask(lambda: values.write_if(key, first, generation), where, store):
            raise _unfit(where, _IGNORES.format("If-Match"))
        if values.read(key)[0] != second:
            raise _unfit(where, "a put was applied whose condition did not hold")
    finally:
        with contextlib.suppress(CheckpointError):  # `gc` finds it
            values.write(key, None)


def _has_ranges(values: Values, key: str, content: bytes) -> bool:
    try:
        return values.read(key, (8, 13))[0] == content[8:13]
    except CorruptCheckpointError:
        return False


_IGNORES = (
    "it ignores {} on a put, so that of two writers both would believe to have committed; where there never "
    'is more than one writer for a path, pass storage_options={{"single_writer": True}}'
)


def _unfit(where: str, what: str) -> StorageError:
    return StorageError(errno.ENOTSUP, f"this store cannot hold checkpoints: {what}", where)


def _ask(request: Callable[[], T], where: str, store: Store) -> T:
    """Repeat a conditional request until there is an answer."""
    patience = Patience(store.options.retry_seconds)
    while True:
        try:
            return request()
        except (ValueError, TimeoutError) as error:
            time.sleep(patience.delay_after(error, where))


class _Listing(Protocol):
    """What a store can tell of its objects. Keys are without the bucket; all methods block."""

    def children(self, prefix: str) -> list[str]:
        """The names of the objects and prefixes directly below `prefix`."""
        ...

    def below(self, prefix: str) -> dict[str, Stat]:
        """Every object below `prefix`, by its key."""
        ...

    def stat(self, key: str) -> Stat | None:
        """One object; None: there is none."""
        ...

    def copy(self, source: str, target: "Store", key: str) -> bool:
        """Copy an object within one service, without moving its bytes through here; whether that is possible."""
        ...


class _ValuesListing:
    """Of the memory of this process, where every object is new."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def children(self, prefix: str) -> list[str]:
        return sorted({key[len(prefix) :].split("/")[0] for key in self._values.keys(prefix)})

    def below(self, prefix: str) -> dict[str, Stat]:
        return {key: stat for key in self._values.keys(prefix) if (stat := self.stat(key))}

    def stat(self, key: str) -> Stat | None:
        data, _ = self._values.read(key)
        return None if data is None else Stat(len(data), time.time())

    def copy(self, source: str, target: "Store", key: str) -> bool:
        return False


class _FileSystemListing:
    """By a file system of fsspec."""

    def __init__(self, file_system: Any, store: Store) -> None:
        self._file_system = file_system
        self._store = store

    def children(self, prefix: str) -> list[str]:
        start = self._path(prefix)
        found = self._ask(prefix, self._file_system._ls, start.rstrip("/"), detail=False) or []
        names = {path.strip("/")[len(start) :] for path in found if path.startswith(start)}
        return sorted(names - {""})

    def below(self, prefix: str) -> dict[str, Stat]:
        start = self._path("")
        found = self._ask(prefix, self._file_system._find, self._path(prefix).rstrip("/"), detail=True) or {}
        return {path[len(start) :]: _stat(info) for path, info in found.items() if path.startswith(self._path(prefix))}

    def stat(self, key: str) -> Stat | None:
        info = self._ask(key, self._file_system._info, self._path(key))
        return _stat(info) if info and info["type"] == "file" else None

    def copy(self, source: str, target: Store, key: str) -> bool:
        if target.options != self._store.options or target.scheme != self._store.scheme:
            return False
        self._ask(source, self._file_system._cp_file, self._path(source), f"{target.bucket}/{key}")
        return True

    def _path(self, key: str) -> str:
        return f"{self._store.bucket}/{key}"

    def _ask(self, key: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call what the file system does asynchronously, again where that may help; None: there is no such object."""
        from fsspec.asyn import sync

        where = f"{self._store.url}{key}"
        patience = Patience(self._store.options.retry_seconds)
        while True:
            try:
                return sync(self._file_system.loop, method, *arguments, timeout=patience.left + 1, **named)
            except FileNotFoundError:
                return None
            except Exception as error:  # noqa: BLE001, each backend has its clients' errors
                time.sleep(patience.delay_after(_as_tensorstore_says(error), where))


def _as_tensorstore_says(error: Exception) -> Exception:
    """An error of a backend of fsspec, in the words that `Patience` knows."""
    if isinstance(error, TimeoutError):
        return error
    status = "PERMISSION_DENIED" if isinstance(error, PermissionError) else "UNAVAILABLE"
    return ValueError(f"{status}: {type(error).__name__}")


def _stat(info: Mapping[str, Any]) -> Stat:
    changed = info.get("LastModified") or info.get("updated") or info.get("mtime")
    if isinstance(changed, str):
        changed = datetime.datetime.fromisoformat(changed)
    return Stat(int(info["size"]), changed.timestamp() if changed else time.time())


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """The objects of `store` below `prefix`, as if it were a directory, which need not exist."""

    store: Store
    prefix: str

    is_local: ClassVar[bool] = False
    pack_bytes: ClassVar[int] = 64 << 20
    """How large packs should be: a request takes long, however little it moves."""
    run_bytes: ClassVar[int] = 32 << 20
    """How much one read should ask for."""

    def __str__(self) -> str:
        return self.path

    @property
    def path(self) -> str:
        return f"{self.store.url}{self.prefix}"

    @property
    def real_path(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2]

    @property
    def parent(self) -> str:
        return f"{self.store.url}{self.prefix.rpartition('/')[0]}"

    def readable_parents(self) -> list[str]:
        """Nothing has to be synced."""
        return []

    @property
    def kvstore(self) -> dict[str, Any]:
        """The objects in TensorStore's words."""
        return self.store.kvstore(self.prefix)

    @property
    def shared(self) -> Context:
        """What all requests to the store share."""
        return self.store.shared

    @property
    def keeps_written_data(self) -> bool:
        """Whether what is written without a copy stays in use for ever."""
        return self.store.keeps_written_data

    @property
    def retry_seconds(self) -> float:
        """How long a write is tried again."""
        return self.store.options.retry_seconds

    def child(self, name: str) -> "ObjectLocation":
        return ObjectLocation(self.store, self._key(name)) if name else self

    def directories(self) -> "Generator[tuple[ObjectLocation, list[str]]]":
        """This prefix and all below it, each with the names below that."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name in self.files():
            parent = ""
            for part in name.split("/"):
                found[parent].add(part)
                parent = f"{parent}/{part}" if parent else part
        for name in sorted(found):
            yield self.child(name), sorted(found[name])

    def files(self) -> dict[str, Stat]:
        """Every object below the prefix, by its relative name."""
        start = self._below
        return {key[len(start) :]: stat for key, stat in self.store.listing.below(start).items()}

    def siblings(self) -> "list[ObjectLocation]":
        """None: nothing is shared between objects."""
        return []

    def modified(self) -> float:
        """When anything below the prefix, or the object where it is one, was last written: seconds since 1970.

        Raises:
            CheckpointNotFoundError: There is nothing.
        """
        own = self.store.listing.stat(self.prefix)
        found = [stat.modified for stat in ([own] if own else self.files().values())]
        if not found:
            raise self._missing("")
        return max(found)

    def names(self) -> list[str] | None:
        """What is directly below the prefix, or None where nothing is."""
        return self.store.listing.children(self._below) or None

    def is_file(self, name: str) -> bool:
        """Whether there is an object `name`."""
        return self.store.values.read(self._key(name), _NO_BYTES)[0] is not None

    def is_directory(self, name: str) -> bool:
        """Whether there is anything below `name`."""
        return self.child(name).names() is not None

    def make(self) -> list[str]:
        """Check that the store can hold checkpoints; there is nothing to create."""
        self.store.check(self.prefix)
        return []

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Keep `gc` in this process away from what is being written. Nobody else is kept out."""
        _locked.add(self.path)
        try:
            yield
        finally:
            _locked.discard(self.path)

    def is_locked(self) -> bool:
        """Whether this process holds it `locked`."""
        return self.path in _locked

    def size(self, name: str) -> int:
        """The size of an object in bytes."""
        stat = self.store.listing.stat(self._key(name))
        if stat is None:
            raise self._missing(name)
        return stat.nbytes

    def check_size(self, name: str, nbytes: int) -> None:
        """Raise where an object is not of exactly `nbytes`.

        Raises:
            CheckpointNotFoundError: No such object.
            CorruptCheckpointError: Another size.
        """
        self._check_size(name, self.size(name), nbytes)

    def content(self, name: str) -> bytes | None:
        """The whole content of an object of records, None where there is none."""
        return self.store.values.read(self._key(name))[0]

    def read(self, name: str) -> bytes:
        """The whole content of an object of records.

        Raises:
            CheckpointNotFoundError: No such object.
            StorageError: It cannot be read.
        """
        data = self.content(name)
        if data is None:
            raise self._missing(name)
        return data

    def read_into(self, name: str, nbytes: int, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill buffers from an object of `nbytes`: each run is an offset and the buffers that follow it.

        Raises:
            CheckpointNotFoundError: No such object.
            CorruptCheckpointError: It is too short, or where all of it is read, of another size.
            StorageError: It cannot be read.
        """
        ranges = [(offset, offset + sum(view.nbytes for view in views)) for offset, views in runs]
        wanted = [None if part == (0, nbytes) else part for part in ranges]
        for (data, _), (first, end), (_, views) in zip(
            self.store.values.read_many(self._key(name), wanted), ranges, runs, strict=True
        ):
            if data is None:
                raise self._missing(name)
            self._check_size(name, first + len(data), end)
            _scatter(data, views)

    def map(self, name: str, nbytes: int) -> Any:
        """Not possible.

        Raises:
            StorageError: Says so.
        """
        raise StorageError(
            errno.ENOTSUP, "memory_map maps files of a local disk; restore this without it", self._at(name)
        )

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a new object; durable on return."""
        self.store.values.write(self._key(name), data)

    def put(self, name: str, data: bytes, *, replaces: bytes | None) -> None:
        """Make an object appear, in one step, in place of exactly what it `replaces`.

        Each put is followed by a look, which settles a lost answer, since the content is
        ours alone, and shows what was altered on its way.

        Args:
            name: Of the object.
            data: Its content, which nobody else writes.
            replaces: What the caller has seen there; None: no such object.

        Raises:
            CheckpointExistsError: Somebody else has written, or removed, the object meanwhile.
            UnsettledCommitError: The storage does not answer, neither to the put nor to the look,
                or what is there is never what was put.
        """
        key, where, values = self._key(name), self._at(name), self.store.values
        patience = Patience(self.retry_seconds)
        lost, written = False, b""
        try:
            while True:
                found, generation = values.read(key)
                if found == data:
                    return
                if found != replaces and generation != written:
                    raise CheckpointExistsError(errno.EEXIST, _OVERTAKEN.format(name), str(self))
                failure: Exception = ValueError("ABORTED: what was put is not what is there")
                try:
                    if (put := values.write_if(key, data, generation)) and not written:
                        written = put
                        continue  # to see that it arrived as it was sent
                    written = put or written
                except (ValueError, TimeoutError) as error:
                    failure, lost = error, lost or is_transient(error)
                time.sleep(patience.delay_after(failure, where))
        except StorageError as error:
            if not (lost or written):
                raise
            raise UnsettledCommitError(error.errno, _UNSETTLED.format(error.strerror), where) from error

    def take(self, name: str) -> bytes:
        """Remove an object and return what was in it. Of several who do this at once, one should succeed.

        Stores of S3's kind do not all check a condition on a deletion, so that two may.

        Raises:
            CheckpointNotFoundError: No such object.
        """
        key, taken = self._key(name), None
        patience = Patience(self.retry_seconds)
        while True:
            found, generation = self.store.values.read(key)
            if found is None and taken is not None:
                return taken  # by a request whose answer was lost
            if found is None:
                raise self._missing(name)
            failure: Exception = ValueError("ABORTED: what is there is not what was read")
            try:
                if self.store.values.write_if(key, None, generation):
                    return found
                taken = None
            except (ValueError, TimeoutError) as error:
                taken, failure = found, error
            time.sleep(patience.delay_after(failure, self._at(name)))

    def link(self, name: str, other: object, other_name: str) -> bool:
        """Not possible: False."""
        return False

    def copy_from(self, other: object, name: str) -> bool:
        """Copy an object of the same name inside of the service; whether that is possible."""
        if not isinstance(other, ObjectLocation):
            return False
        return other.store.listing.copy(other._key(name), self.store, self._key(name))

    def sync(self, directories: Iterable[str]) -> None:
        """Nothing is left to do."""

    def unlink(self, name: str) -> None:
        """Delete an object."""
        self.store.values.write(self._key(name), None)

    def remove(self) -> None:
        """Delete all that is below the prefix. Gone already is fine."""
        self.store.values.delete_below(self._below)

    def remove_if_empty(self, new_entries: Sequence[str]) -> None:
        """Nothing is left to do: what is empty does not exist."""

    @property
    def _below(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""

    def _key(self, name: str) -> str:
        return f"{self._below}{name}"

    def _at(self, name: str) -> str:
        return f"{self.store.url}{self._key(name)}"

    def _missing(self, name: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(errno.ENOENT, "no such file", self._at(name))

    def _check_size(self, name: str, found: int, nbytes: int) -> None:
        if found != nbytes:
            raise CorruptCheckpointError(f"{self._at(name)}: the file has {found} bytes; expected {nbytes}")


_OVERTAKEN = "somebody else changed {} while this save ran; what they left stays"
_UNSETTLED = (
    "whether the commit happened is not known, for its answer was lost or is not what was sent: {}. Look with "
    "describe(), and save again if the checkpoint is not there; its data stay until gc() finds that nothing names them"
)


def _scatter(data: bytes, views: Sequence[memoryview]) -> None:
    """Copy bytes into buffers, one after the other; NumPy lets other threads run meanwhile."""
    source, at = np.frombuffer(data, np.uint8), 0
    for view in views:
        np.copyto(np.frombuffer(view, np.uint8), source[at : at + view.nbytes])
        at += view.nbytes
