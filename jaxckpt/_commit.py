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

from jaxckpt._errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, StorageError
from jaxckpt._location import Location
from jaxckpt._manifest import Manifest, decode_manifest, encode_manifest

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
        self._replaces: str | None = None
        self._new_entries: list[str] = []
        # Taken by whoever publishes or abandons the attempt: only one of them happens.
        self._fate = threading.Lock()

    def begin(self) -> None:
        """Check that a checkpoint may be written and make its private data directory.

        Raises:
            CheckpointExistsError: There is a checkpoint that may not be replaced, or the
                directory holds files that are not a checkpoint's; nothing was touched.
            StorageError: The directory cannot be made.
        """
        found = self._root.names() or []
        foreign = sorted(name for name in found if not _OURS.fullmatch(name))
        if foreign:
            names = ", ".join(foreign[:3])
            raise CheckpointExistsError(
                errno.EEXIST, f"the directory holds other files ({names}); choose an empty one", str(self._root)
            )
        if MANIFEST in found:
            if not self._overwrite:
                raise CheckpointExistsError(
                    errno.EEXIST,
                    "a checkpoint is there already; overwrite=True (--overwrite) replaces it",
                    str(self._root),
                )
            self._replaces = _data_of(self._root)
        self._new_entries = self.data.make()

    def publish(self, manifest: Manifest, directories: Iterable[str]) -> None:
        """Make every directory of the data durable, then the checkpoint visible, then remove what it replaced.

        Raises:
            CheckpointExistsError: Somebody else committed a checkpoint here meanwhile.
            StorageError: Something could not be made durable; nothing was published.
        """
        self._root.sync([*directories, self.data.path, *self._new_entries])
        if not self._fate.acquire(blocking=False):
            return  # abandoned: the save has timed out, and nobody waits for this any more
        try:
            self._root.put(MANIFEST, encode_manifest(manifest), replace=self._overwrite)
        except CheckpointError:
            if not is_current(self._root, manifest):
                self._discard()
            raise
        if self._replaces is not None:
            _discard(self._root.child(self._replaces))

    def abandon(self) -> None:
        """Remove what a failed attempt has written. Never raises: the failure itself is the news."""
        if self._fate.acquire(blocking=False):
            self._discard()

    def _discard(self) -> None:
        _discard(self.data)
        self._root.remove_if_empty(self._new_entries[1:])


def read(root: Location) -> Manifest:
    """The manifest of the checkpoint at `root`.

    Raises:
        CheckpointNotFoundError: There is none.
        CorruptCheckpointError: It was altered, or is of an unknown format version.
    """
    try:
        return decode_manifest(root.read(MANIFEST), f"{root}/{MANIFEST}")
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(errno.ENOENT, f"no checkpoint: there is no {MANIFEST}", str(root)) from None


def is_current(root: Location, manifest: Manifest) -> bool:
    """Whether the checkpoint at `root` is the one that `manifest` describes."""
    try:
        return read(root).attempt == manifest.attempt
    except CheckpointError:
        return False


def _data_of(root: Location) -> str | None:
    """The data directory of the checkpoint at `root`; that of an unreadable one is left to `gc`."""
    with contextlib.suppress(CheckpointError):
        return read(root).data
    return None


def _discard(data: Location) -> None:
    try:
        data.remove()
    except (StorageError, OSError) as error:
        _log.warning("%s could not be removed (%s); it is unused and can be deleted", data, error)
