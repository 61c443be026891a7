"""Remove what killed saves have left: data that no manifest names."""

import contextlib
import errno
import re
import time
from dataclasses import dataclass

from jaxckpt import _commit
from jaxckpt._errors import CheckpointError, CheckpointNotFoundError, StorageError
from jaxckpt._location import Location

_DATA = re.compile(r"d-[0-9a-f]{32}")
_TEMPORARY = re.compile(r"\.(manifest|zarr)\.json\.[0-9a-f]{32}")
_IN_DATA = re.compile(r"index-\d+\.json|arrays|packs")


@dataclass(frozen=True, slots=True)
class GcReport:
    """What `gc` found.

    Attributes:
        removed: Paths of the leftovers that were removed; by a dry run: that would be.
        kept: Paths of other leftovers, each with the reason why they stay.
        nbytes: Bytes in what was removed.
    """

    removed: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    nbytes: int


def gc(root: Location, grace_seconds: float, *, dry_run: bool) -> GcReport:
    """Remove the leftovers of saves at and below `root`. Blocks."""
    collection = _Collection(grace_seconds, dry_run=dry_run)
    if root.names() is None:
        raise CheckpointNotFoundError(errno.ENOENT, "no such directory", str(root))
    for directory, names in root.directories():
        candidates = list(filter(_is_candidate, names))
        names[:] = [name for name in names if not _DATA.fullmatch(name)]
        if candidates:
            with contextlib.suppress(CheckpointNotFoundError):  # the directory has just been deleted
                collection.clean(directory)
    return GcReport(tuple(collection.removed), tuple(collection.kept), collection.nbytes)


class _Collection:
    def __init__(self, grace_seconds: float, *, dry_run: bool) -> None:
        self._grace_seconds = grace_seconds
        self._dry_run = dry_run
        self.removed: list[str] = []
        self.kept: list[tuple[str, str]] = []
        self.nbytes = 0

    def clean(self, directory: Location) -> None:
        """Remove the leftovers in `directory`, and itself if it held nothing else."""
        before = len(self.removed)
        with directory.locked():  # so that no save begins or commits here meanwhile
            named, problem = _named(directory)
            for name in sorted(filter(_is_candidate, directory.names() or [])):
                if name == named:
                    continue
                try:
                    self._consider(directory, name, problem if _DATA.fullmatch(name) else None)
                except (CheckpointNotFoundError, StorageError) as error:
                    if error.errno != errno.ENOENT:
                        raise
                    # Whoever has replaced or deleted it removes it at this moment.
        if len(self.removed) > before and not self._dry_run:
            directory.remove_if_empty([directory.parent])

    def _consider(self, directory: Location, name: str, problem: str | None) -> None:
        if reason := problem or self._why_kept(directory, name):
            self.kept.append((str(directory.child(name)), reason))
        else:
            self._remove(directory, name)

    def _why_kept(self, directory: Location, name: str) -> str | None:
        leftover = directory.child(name)
        if _TEMPORARY.fullmatch(name):
            if not directory.is_file(name):
                return "not a file"
        elif not directory.is_directory(name):
            return "not a directory"
        elif not all(map(_IN_DATA.fullmatch, leftover.names() or [])):
            return "it holds files that are not a checkpoint's"
        elif leftover.is_locked():
            return "a save is writing it"
        # A clock that was set makes the age negative; what matters is that nobody wrote just now.
        age = abs(time.time() - leftover.modified())
        if age < self._grace_seconds:
            return f"changed {age:.0f} seconds ago, within the grace period of {self._grace_seconds:.0f}"
        return None

    def _remove(self, directory: Location, name: str) -> None:
        leftover = directory.child(name)
        if _TEMPORARY.fullmatch(name):
            self.nbytes += directory.size(name)
            if not self._dry_run:
                directory.unlink(name)
        else:
            self.nbytes += sum(file.nbytes for file in leftover.files().values())
            if not self._dry_run:
                leftover.remove()
        self.removed.append(str(leftover))


def _is_candidate(name: str) -> bool:
    return bool(_DATA.fullmatch(name) or _TEMPORARY.fullmatch(name))


def _named(directory: Location) -> tuple[str | None, str | None]:
    """The data directory that the manifest in `directory` names, or why that cannot be told."""
    try:
        return _commit.read(directory).data, None
    except CheckpointNotFoundError:
        return None, None
    except CheckpointError as error:
        return None, f"the manifest may name it, but cannot be read: {error}"
