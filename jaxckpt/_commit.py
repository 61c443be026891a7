"""A checkpoint appears whole or not at all.

Data of an attempt go under a fresh directory `d-<attempt>`. When they are durable,
`manifest.json` is put in one atomic step and names that directory; that is the commit.
"""

import contextlib
import datetime
import errno
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import PurePosixPath

from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UnsettledCommitError,
)
from jaxckpt._location import Location
from jaxckpt._manifest import File, Index, IndexFile, Manifest, decode_index, decode_manifest, encode_manifest

MANIFEST = "manifest.json"

_OURS = re.compile(r"manifest\.json|d-[0-9a-f]{32}|\.manifest\.json\.[0-9a-f]{32}")

_LOOKS = 40
_SECONDS_BETWEEN_LOOKS = 0.05

_log = logging.getLogger("jaxckpt")


class Attempt:
    """A save in progress at `root`. All methods block.

    Args:
        root: Where the checkpoint is to be.
        overwrite: Whether it may replace one.
        id: Of the attempt, where another process has begun it, which this one joins, or where it is copied.
        created: When it was begun, likewise.
    """

    def __init__(self, root: Location, *, overwrite: bool, id: str = "", created: str = "") -> None:
        self.id = id or uuid.uuid4().hex
        self.created = created or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._joins = bool(id)
        self.data = root.child(f"d-{self.id}")
        self._root = root
        self._overwrite = overwrite
        self._replaces: bytes | None = None
        self._new_entries: list[str] = []
        # For as long as the attempt lives it holds its data directory locked: `gc` leaves that alone.
        self._life = contextlib.ExitStack()
        # Taken by whoever publishes or abandons the attempt: only one of them happens.
        self._fate = threading.Lock()

    def begin(self) -> None:
        """Check that a checkpoint may be written and make its private data directory.

        Raises:
            CheckpointExistsError: There is a checkpoint that may not be replaced, or the
                directory holds files that are not a checkpoint's; nothing was touched.
            StorageError: The directory cannot be made.
        """
        self._replaces = self._claimable()
        while True:
            self._new_entries += self._root.make()
            try:
                with self._root.locked():
                    self.data.make()
                    self._life.enter_context(self.data.locked())
                if self._fate.locked():  # abandoned, while the storage hung
                    self._discard()
                return
            except CheckpointNotFoundError:
                continue  # somebody who gave up has just removed the directory that was empty

    def join(self) -> None:
        """Check that the data directory that another process has made is seen here too.

        Raises:
            StorageError: It is not: the processes do not share this storage.
        """
        if not self._root.is_local:
            return  # the first process looks whether it sees what this one has written
        for _ in range(_LOOKS):
            if self._root.is_directory(self.data.name):
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        raise StorageError(
            errno.ENOENT,
            f"process 0 has made the directory {self.data.name} there, which this process does not see; "
            "all processes must save to one path on storage that they share, not on a disk of their own",
            str(self._root),
        )

    def _claimable(self) -> bytes | None:
        """The manifest that is to be replaced, None where there is none."""
        found = self._root.names() or []
        foreign = sorted(name for name in found if not _OURS.fullmatch(name))
        if foreign:
            names = ", ".join(foreign[:3])
            raise CheckpointExistsError(
                errno.EEXIST, f"the directory holds other files ({names}); choose an empty one", str(self._root)
            )
        # Asked for by its name, since an object store may list what was there a while ago.
        if not self._overwrite and (MANIFEST in found or self._root.is_file(MANIFEST)):
            raise CheckpointExistsError(
                errno.EEXIST,
                "a checkpoint is there already; overwrite=True (--overwrite) replaces it",
                str(self._root),
            )
        return self._root.content(MANIFEST) if self._overwrite else None

    def directories(self, files: Iterable[File]) -> list[str]:
        """Those that must be synced for `files`, in the data directory, to be found."""
        parents = {str(parent) for file in files for parent in PurePosixPath(file.name).parents}
        below = [self.data.child(parent).path for parent in sorted(parents - {"."})]
        # The one around the root too: it may have been made a moment ago by a save that failed.
        around = [self.data.path, self._root.path, *self._root.readable_parents(), *self._new_entries]
        return list(dict.fromkeys([*below, *around]))

    def sync(self, directory: str) -> None:
        """Make the entries of a directory durable."""
        self._root.sync([directory])

    def publish(self, manifest: Manifest) -> None:
        """Make the checkpoint visible, then remove what it replaced. All data are durable already.

        Raises:
            CheckpointExistsError: Somebody else committed a checkpoint here meanwhile.
            StorageError: The manifest could not be made durable; nothing was published.
            UnsettledCommitError: Whether it was published is not known; the data stay.
        """
        if not self._fate.acquire(blocking=False):
            return  # abandoned: the save has timed out, and nobody waits for this any more
        try:
            self._root.put(MANIFEST, encode_manifest(manifest), replaces=self._replaces)
        except UnsettledCommitError:
            raise
        except CheckpointError:
            if not _may_be_current(self._root, manifest):
                self._discard()
            raise
        finally:
            self._life.close()
        if self._replaces is not None:
            _discard_data(self._root, self._replaces)

    def abandon(self) -> None:
        """Remove what a failed attempt has written. Never raises: the failure itself is the news.

        A process that has joined leaves that to the one that began: it may be about to
        commit. So does a copy, which goes on from there when it is made again.
        """
        if self._joins:
            self._life.close()
        elif self._fate.acquire(blocking=False):
            self._discard()

    def _discard(self) -> None:
        _discard(self.data)
        self._life.close()
        self._root.remove_if_empty(self._new_entries)


def delete(root: Location) -> None:
    """Remove the checkpoint at `root`: first its manifest, so that it is gone at once and as a whole, then its data.

    Raises:
        CheckpointNotFoundError: There is none.
        StorageError: The storage failed; it is gone or as it was.
    """
    try:
        manifest = root.take(MANIFEST)
    except CheckpointNotFoundError:
        raise _not_found(root) from None
    _discard_data(root, manifest)
    root.remove_if_empty([root.parent])


def read(root: Location) -> Manifest:
    """The manifest of the checkpoint at `root`.

    Raises:
        CheckpointNotFoundError: There is none.
        CorruptCheckpointError: It was altered, or is of an unknown format version.
    """
    try:
        return decode_manifest(root.read(MANIFEST), f"{root}/{MANIFEST}")
    except CheckpointNotFoundError:
        raise _not_found(root) from None


def check_seen(data: Location, process: int, name: str, nbytes: int) -> None:
    """Whether this process sees a file that another one has written.

    Raises:
        StorageError: It does not: they do not share this storage.
    """
    try:
        data.check_size(name, nbytes)
    except CheckpointError as error:
        raise StorageError(
            errno.ENOENT,
            f"process {process} has written {name} there, which process 0 does not see; "
            "all processes must use one path on storage that they share, not on a disk of their own",
            str(data),
        ) from error


def read_index(data: Location, file: IndexFile) -> Index:
    """The index file `file` in the data directory `data`.

    Raises:
        CorruptCheckpointError: It is missing, or was altered.
    """
    where = f"{data}/{file.name}"
    try:
        return decode_index(data.read(file.name), file, where)
    except CheckpointNotFoundError as error:
        raise CorruptCheckpointError(f"{where}: the index file is missing") from error


def is_current(root: Location, manifest: Manifest) -> bool:
    """Whether the checkpoint at `root` is the one that `manifest` describes."""
    try:
        return read(root).attempt == manifest.attempt
    except CheckpointError:
        return False


def _may_be_current(root: Location, manifest: Manifest) -> bool:
    """Whether `manifest` may have been put: also where that cannot be told, since the storage fails."""
    try:
        return read(root).attempt == manifest.attempt
    except CheckpointNotFoundError:
        return False
    except CheckpointError:
        return True


def _not_found(root: Location) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(errno.ENOENT, f"no checkpoint: there is no {MANIFEST}", str(root))


def _discard_data(root: Location, manifest: bytes) -> None:
    """Remove the data that a former manifest named; those of an unreadable one are left to `gc`."""
    with contextlib.suppress(CheckpointError):
        _discard(root.child(decode_manifest(manifest, str(root)).data))


def _discard(data: Location) -> None:
    try:
        data.remove()
    except (StorageError, OSError) as error:
        _log.warning("%s could not be removed (%s); it is unused and can be deleted", data, error)
