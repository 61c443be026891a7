"""A directory of a local file system, and the durable file operations on it.

Every name given to a `LocalLocation` is relative, and comes from us or through the checked
`Name` type of the records, so it cannot leave the directory. The directory that a caller
names may be reached through links; below it none is followed, and only regular files are
opened.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from jaxckpt._stat import Stat

_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_IOV_MAX = 1024
_MOST_RECORD_BYTES = 1 << 30

_open_directories: set[int] = set()
"""Descriptors by which this process holds directories locked, or waits for them."""


def _stat(found: os.stat_result) -> Stat:
    return Stat(found.st_size, found.st_mtime, (found.st_dev, found.st_ino), found.st_nlink)


@contextlib.contextmanager
def storage_errors(path: str) -> Generator[None]:
    """Turn an OSError of the block into a `StorageError` that names `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        # A name below an open directory says too little.
        named = error.filename if os.path.isabs(error.filename or "") else path
        raise StorageError(error.errno or errno.EIO, error.strerror or str(error), named) from error


@dataclass(frozen=True, slots=True)
class LocalLocation:
    """A directory of a local file system, which need not exist yet.

    `top` is the directory that the caller named where this one is a child of that.
    """

    path: str
    top: str = ""

    is_local: ClassVar[bool] = True
    pack_bytes: ClassVar[int] = 16 << 20
    """How large packs should be; 64 MiB were slower."""
    run_bytes: ClassVar[int] = 16 << 20
    """How much one read should ask for."""
    shared: ClassVar[None] = None
    keeps_written_data: ClassVar[bool] = False
    retry_seconds: ClassVar[float] = 0.0
    """What fails here does not go better the next time."""

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def parent(self) -> str:
        return os.path.dirname(self.path)

    def readable_parents(self) -> list[str]:
        """The directory that this one is in. None where it may not be read, and so not be synced either."""
        return [self.parent] if os.access(self.parent, os.R_OK) else []

    @property
    def kvstore(self) -> dict[str, Any]:
        """The directory in TensorStore's words."""
        return {"driver": "file", "path": f"{self.path}/"}

    def child(self, name: str) -> "LocalLocation":
        return LocalLocation(os.path.join(self.path, name), self.top or self.path) if name else self

    def directories(self) -> "Generator[tuple[LocalLocation, list[str]]]":
        """This directory and all below it, each with its names; taking a name off its list leaves that one out."""
        for path, directories, files in os.walk(self.path, followlinks=False, onerror=_raise):
            names = [*directories, *files]
            yield LocalLocation(path), names
            directories[:] = [name for name in directories if name in names]

    def files(self) -> dict[str, Stat]:
        """Everything below the directory but directories, by its relative name; links are not followed."""
        found: dict[str, Stat] = {}
        if os.path.islink(self.path):  # which os.walk would follow
            return found
        for path, _, names in os.walk(self.path, followlinks=False, onerror=_raise):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    stat_ = os.lstat(os.path.join(path, name))
                    found[os.path.relpath(os.path.join(path, name), self.path)] = _stat(stat_)
        return found

    def siblings(self) -> "list[LocalLocation]":
        """The other directories that are in the same one."""
        parent = LocalLocation(self.parent)
        names = sorted(name for name in parent.names() or [] if parent.is_directory(name))
        return [parent.child(name) for name in names if name != self.name]

    def modified(self) -> float:
        """When the directory or anything in it, or the file where it is one, was last changed: seconds since 1970."""
        with storage_errors(self.path):
            own = os.lstat(self.path)
            below = self.files().values() if stat.S_ISDIR(own.st_mode) else ()
            return max([own.st_mtime, *(file.modified for file in below)])

    def names(self) -> list[str] | None:
        """What the directory holds, or None where there is no such directory."""
        try:
            with storage_errors(self.path):
                return os.listdir(self.path)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def is_file(self, name: str) -> bool:
        """Whether `name` is a regular file, not a link to one."""
        try:
            return stat.S_ISREG(os.lstat(self._at(name)).st_mode)
        except OSError:
            return False

    def is_directory(self, name: str) -> bool:
        """Whether `name` is a directory, not a link to one."""
        try:
            return stat.S_ISDIR(os.lstat(self._at(name)).st_mode)
        except OSError:
            return False

    @property
    def real_path(self) -> str:
        """The path with all links followed."""
        return os.path.realpath(self.path)

    def make(self) -> list[str]:
        """Create the directory and its parents, all or none; return those directories that got a new entry."""
        new_entries, path = [], self.path
        while not os.path.isdir(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
            new_entries.append(path)
        try:
            with storage_errors(self.path):
                os.makedirs(self.path, exist_ok=True)
        except StorageError:
            self.remove_if_empty(new_entries)
            raise
        return new_entries

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Keep out, for the length of the block, whoever else asks for the same directory.

        A process that dies lets go. Where the file system has no locks nobody is kept out.

        Raises:
            CheckpointNotFoundError: There is no such directory.
        """
        while True:
            with self._directory() as fd:
                with storage_errors(self.path):
                    _lock(fd, fcntl.LOCK_EX)
                    current = self._is(fd)  # and not removed, perhaps made again, while we waited
                if current:
                    yield
                    return

    def is_locked(self) -> bool:
        """Whether somebody holds the directory `locked`."""
        with self._directory() as fd, storage_errors(self.path):
            try:
                _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        with self._open(name) as fd:
            return os.fstat(fd).st_size

    def check_size(self, name: str, nbytes: int) -> None:
        """Raise where a file is not of exactly `nbytes`.

        Raises:
            CheckpointNotFoundError: No such file.
            CorruptCheckpointError: Another size, or not a regular file.
        """
        with self._open(name) as fd:
            self._check_size(fd, name, nbytes)

    def content(self, name: str) -> bytes | None:
        """As `read`, None where there is no such file."""
        try:
            return self.read(name)
        except CheckpointNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        """The whole content of a file of records.

        Raises:
            CheckpointNotFoundError: No such file.
            CorruptCheckpointError: It is far larger than records are.
            StorageError: It cannot be read.
        """
        with self._open(name) as fd, storage_errors(self._at(name)), os.fdopen(os.dup(fd), "rb") as file:
            if os.fstat(fd).st_size > _MOST_RECORD_BYTES:
                raise CorruptCheckpointError(f"{self._at(name)}: more than {_MOST_RECORD_BYTES} bytes of records")
            return file.read()

    def read_into(self, name: str, nbytes: int, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill buffers from a file of exactly `nbytes`: each run is an offset and the buffers that follow it.

        Raises:
            CheckpointNotFoundError: No such file.
            CorruptCheckpointError: The file has another size.
            StorageError: It cannot be read.
        """
        with self._open(name) as fd:
            self._check_size(fd, name, nbytes)
            with storage_errors(self._at(name)):
                for offset, buffers in runs:
                    _read_fully(fd, offset, buffers, self._at(name))

    def map(self, name: str, nbytes: int) -> mmap.mmap:
        """Map a file of exactly `nbytes`, read-only. It stays mapped for as long as the result lives."""
        with self._open(name) as fd:
            self._check_size(fd, name, nbytes)
            with storage_errors(self._at(name)):
                return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a new file and make its content durable, but not its directory entry: see `sync`."""
        with storage_errors(self._at(name)):
            fd = os.open(self._at(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)

    def put(self, name: str, data: bytes, *, replaces: bytes | None) -> None:
        """Make a file appear whole and durable, in one step, in place of exactly what it `replaces`.

        Args:
            name: Of the file.
            data: Its content.
            replaces: What the caller has seen there; None: no such file.

        Raises:
            CheckpointExistsError: Somebody else has written, or removed, the file meanwhile.
        """
        temporary = f".{name}.{uuid.uuid4().hex}"
        try:
            with self.locked(), storage_errors(self._at(name)):  # `gc` takes what it finds without a lock for left
                self.write(temporary, data)
                if self.content(name) != replaces:
                    raise self._overtaken(name)
                if replaces is None:
                    os.link(self._at(temporary), self._at(name))
                else:
                    os.rename(self._at(temporary), self._at(name))
                self.sync([self.path])
        except StorageError as error:
            if error.errno == errno.EEXIST:
                raise self._overtaken(name) from error
            raise
        finally:
            with contextlib.suppress(OSError):  # what stays of it is invisible, and `gc` removes it
                os.unlink(self._at(temporary))

    def take(self, name: str) -> bytes:
        """Remove a file, durably, and return what was in it. Of several who do this at once, one succeeds.

        Raises:
            CheckpointNotFoundError: No such file.
        """
        with self.locked():
            data = self.read(name)
            self.unlink(name)
            self.sync([self.path])
        return data

    def copy_from(self, other: object, name: str) -> bool:
        """Not possible without moving the bytes through here: False."""
        return False

    def link(self, name: str, other: object, other_name: str) -> bool:
        """Make a file of another directory, a regular one, appear here too; whether that is possible."""
        if not isinstance(other, LocalLocation):
            return False
        try:
            with other._open(other_name):
                os.link(other._at(other_name), self._at(name), follow_symlinks=False)
        except (CheckpointError, OSError):
            return False
        return True

    def sync(self, directories: Iterable[str]) -> None:
        """Make the entries of directories durable."""
        for directory in directories:
            with storage_errors(directory):
                fd = os.open(directory, _READ_DIRECTORY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def unlink(self, name: str) -> None:
        """Delete a file."""
        with storage_errors(self._at(name)):
            os.unlink(self._at(name))

    def remove(self) -> None:
        """Delete the directory and what is in it; links are removed, never followed. Gone already is fine."""
        with storage_errors(self.path), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path, onerror=_keep_going_if_gone)

    def remove_if_empty(self, new_entries: Sequence[str]) -> None:
        """Undo `make` where nothing else was put there since: `new_entries` is what it returned."""
        for path in [self.path, *new_entries][: len(new_entries)]:
            try:
                with LocalLocation(path).locked():  # somebody who makes a directory here holds it
                    os.rmdir(path)
            except CheckpointNotFoundError:
                continue
            except OSError:
                return

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _overtaken(self, name: str) -> CheckpointExistsError:
        return CheckpointExistsError(
            errno.EEXIST, f"somebody else changed {name} while this save ran; what they left stays", str(self)
        )

    @contextlib.contextmanager
    def _directory(self) -> Generator[int]:
        try:
            with storage_errors(self.path):
                fd = os.open(self.path, _READ_DIRECTORY)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                raise CheckpointNotFoundError(errno.ENOENT, "no such directory", self.path) from error
            raise
        _open_directories.add(fd)
        try:
            yield fd
        finally:
            _open_directories.discard(fd)
            _close(fd)

    def _is(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _open(self, name: str) -> Generator[int]:
        path, top = self._at(name), self.top or self.path
        try:
            with storage_errors(path):
                fd = _open_below(top, os.path.relpath(path, top))
        except StorageError as error:
            if error.errno == errno.ENOENT or not os.path.isdir(top):
                raise CheckpointNotFoundError(errno.ENOENT, "no such file", path) from error
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise CorruptCheckpointError(
                    f"{path}: a link, or a file in place of a directory; expected a regular file"
                ) from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CorruptCheckpointError(f"{path}: not a regular file")
            yield fd
        finally:
            _close(fd)

    def _check_size(self, fd: int, name: str, nbytes: int) -> None:
        found = os.fstat(fd).st_size
        if found != nbytes:
            raise CorruptCheckpointError(f"{self._at(name)}: the file has {found} bytes; expected {nbytes}")


def _open_below(top: str, name: str) -> int:
    """Open a file for reading, following links to `top` but none below it."""
    *directories, last = name.split(os.sep)
    at = os.open(top, _READ_DIRECTORY)
    try:
        for directory in directories:
            below = os.open(directory, _READ_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            _close(at)
            at = below
        return os.open(last, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        _close(at)


def _close(fd: int) -> None:
    """Close what was only read or locked: it is closed whatever the system says, and nothing can be lost."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _let_go_in_child() -> None:
    """In a forked process: a lock is held until the last copy of its descriptor is closed, and it is the parent's."""
    for fd in _open_directories:
        _close(fd)
    _open_directories.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _lock(fd: int, how: int) -> None:
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _read_fully(fd: int, offset: int, buffers: Sequence[memoryview], path: str) -> None:
    pending = [view for view in buffers if view.nbytes]
    while pending:
        got = os.preadv(fd, pending[:_IOV_MAX], offset)
        if got == 0:
            raise CorruptCheckpointError(f"{path}: the file ends at byte {offset}, while it is being read")
        offset += got
        done = 0
        while done < len(pending) and got >= pending[done].nbytes:
            got -= pending[done].nbytes
            done += 1
        pending = pending[done:]
        if got:
            pending[0] = pending[0][got:]


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise StorageError(error.errno or errno.EIO, error.strerror or str(error), error.filename) from error


def _keep_going_if_gone(function: Callable[..., Any], path: str, info: Any) -> None:
    error = info[1]
    if not isinstance(error, FileNotFoundError):
        raise StorageError(error.errno or errno.EIO, error.strerror or str(error), path) from error
