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
from dataclasses import dataclass

from jaxckpt._errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, StorageError
from jaxckpt._location import Location
from jaxckpt._manifest import Manifest, decode_manifest, encode_manifest

MANIFEST = "manifest.json"

_OURS = re.compile(r"manifest\.json|d-[0-9a-f]{32}|\.manifest\.json\.[0-9a-f]{32}")

_log = logging.getLogger("jaxckpt")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A save in progress: where it goes, under which id, and what it would replace."""

    root: Location
    id: str
    created: str
    replaces: str | None
    new_entries: list[str]
    fate: threading.Lock
    """Taken once: by whoever publishes the attempt or abandons it, so that only one of them happens."""

    @property
    def data(self) -> Location:
        return self.root.child(f"d-{self.id}")


def begin(root: Location, *, overwrite: bool) -> Attempt:
    """Check that a checkpoint may be written at `root` and make its private data directory.

    Raises:
        CheckpointExistsError: There is a checkpoint and `overwrite` is false, or the
            directory holds files that are not a checkpoint's; nothing was touched.
        StorageError: The directory cannot be made.
    """
    found = root.names() or []
    foreign = sorted(name for name in found if not _OURS.fullmatch(name))
    if foreign:
        raise CheckpointExistsError(
            errno.EEXIST, f"the directory holds other files ({', '.join(foreign[:3])}); choose an empty one", str(root)
        )
    if MANIFEST in found and not overwrite:
        raise CheckpointExistsError(
            errno.EEXIST, "a checkpoint is there already; overwrite=True (--overwrite) replaces it", str(root)
        )
    attempt = uuid.uuid4().hex
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    replaces = _replaced(root) if MANIFEST in found else None
    new_entries = root.child(f"d-{attempt}").make()
    return Attempt(root, attempt, created, replaces, new_entries, threading.Lock())


def publish(attempt: Attempt, manifest: Manifest, directories: Iterable[str], *, overwrite: bool) -> None:
    """Make every directory of the data durable, then the checkpoint visible, then remove what it replaced.

    Raises:
        CheckpointExistsError: Somebody else committed a checkpoint here meanwhile.
        StorageError: Something could not be made durable; nothing was published.
    """
    attempt.root.sync([*directories, attempt.data.path, *attempt.new_entries])
    if not attempt.fate.acquire(blocking=False):
        return  # abandoned meanwhile: the save was cancelled or timed out, and nobody waits for this
    try:
        attempt.root.put(MANIFEST, encode_manifest(manifest), replace=overwrite)
    except CheckpointError:
        if not is_current(attempt.root, manifest):
            _discard(attempt.data)
        raise
    if attempt.replaces is not None:
        _discard(attempt.root.child(attempt.replaces))


def abandon(attempt: Attempt) -> None:
    """Remove what a failed attempt has written. Never raises: the failure itself is the news."""
    if attempt.fate.acquire(blocking=False):
        _discard(attempt.data)
        attempt.root.remove_if_empty(attempt.new_entries[1:])


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


def _replaced(root: Location) -> str | None:
    """The data directory of the checkpoint that is about to be replaced; an unreadable one is left to `gc`."""
    with contextlib.suppress(CheckpointError):
        return read(root).data
    return None


def _discard(data: Location) -> None:
    try:
        data.remove()
    except (StorageError, OSError) as error:
        _log.warning("%s could not be removed (%s); it is unused and can be deleted", data, error)
