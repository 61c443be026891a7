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
import uuid
from collections.abc import Iterable

from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from jaxckpt._location import Location
from jaxckpt._manifest import Index, IndexFile, Manifest, decode_index, decode_manifest, encode_manifest

MANIFEST = "manifest.json"

_OURS = re.compile(r"manifest\.json|d-[0-9a-f]{32}|\.manifest\.json\.[0-9a-f]{32}")

_log = logging.getLogger("jaxckpt")


class Attempt:
    """A save in progress at `root`. All methods block.

    Args:
        root: Where the checkpoint is to be.
        overwrite: Whether it may replace one.
    """

    def __init__(self, root: Location, *, overwrite: bool) -> None:
        self.id = uuid.uuid4().hex
        self.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
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

    def _claimable(self) -> bytes | None:
        """The manifest that is to be replaced, None where there is none."""
        found = self._root.names() or []
        foreign = sorted(name for name in found if not _OURS.fullmatch(name))
        if foreign:
            names = ", ".join(foreign[:3])
            raise CheckpointExistsError(
                errno.EEXIST, f"the directory holds other files ({names}); choose an empty one", str(self._root)
            )
        if MANIFEST not in found:
            return None
        if not self._overwrite:
            raise CheckpointExistsError(
                errno.EEXIST,
                "a checkpoint is there already; overwrite=True (--overwrite) replaces it",
                str(self._root),
            )
        return self._root.read(MANIFEST)

    def publish(self, manifest: Manifest, directories: Iterable[str]) -> None:
        """Make every directory of the data durable, then the checkpoint visible, then remove what it replaced.

        Raises:
            CheckpointExistsError: Somebody else committed a checkpoint here meanwhile.
            StorageError: Something could not be made durable; nothing was published.
        """
        # The directory around the root too: it may have been made a moment ago by a save that failed.
        around = [self._root.path, *self._root.readable_parents(), *self._new_entries]
        self._root.sync(dict.fromkeys([*directories, self.data.path, *around]))
        if not self._fate.acquire(blocking=False):
            return  # abandoned: the save has timed out, and nobody waits for this any more
        try:
            self._root.put(MANIFEST, encode_manifest(manifest), replaces=self._replaces)
        except CheckpointError:
            if not is_current(self._root, manifest):
                self._discard()
            raise
        finally:
            self._life.close()
        if self._replaces is not None:
            _discard_data(self._root, self._replaces)

    def abandon(self) -> None:
        """Remove what a failed attempt has written. Never raises: the failure itself is the news."""
        if self._fate.acquire(blocking=False):
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
        with root.locked():
            manifest = root.read(MANIFEST)
            root.unlink(MANIFEST)
    except CheckpointNotFoundError:
        raise _not_found(root) from None
    root.sync([root.path])
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
