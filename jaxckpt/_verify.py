"""Every stored byte of a checkpoint compared with the records of it. Nothing is restored."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from jaxckpt import _commit, _reader
from jaxckpt._budget import Progress, default_host_bytes
from jaxckpt._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from jaxckpt._location import Location
from jaxckpt._manifest import File, Index, Leaf, Manifest, digest, dtype_named
from jaxckpt._reader import Fault, Reader, Stored, Wanted
from jaxckpt._store import METADATA
from jaxckpt._tasks import in_thread


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: The checkpoint.
        attempt: The unique id of the save that made it; empty where the manifest is damaged.
        leaves: The names of all its leaves, in order.
        faults: What is wrong, one entry for each damaged block or file; its `leaf` is
            empty where a file belongs to no single leaf.
        nbytes: Bytes of array data that were read and compared.
        seconds: How long that took.
    """

    path: str
    attempt: str
    leaves: tuple[str, ...]
    faults: tuple[Fault, ...]
    nbytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def by_leaf(self) -> dict[str, list[Fault]]:
        """The faults of each leaf, in the order of the tree; sound leaves have an empty list."""
        found: dict[str, list[Fault]] = {name: [] for name in self.leaves}
        for fault in self.faults:
            if fault.leaf in found:
                found[fault.leaf].append(fault)
        return found


async def verify(root: Location, on_progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Compare all that is stored at `root`. A checkpoint that is overwritten meanwhile is begun again.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    while True:
        began = time.monotonic()
        try:
            manifest = await in_thread(_commit.read, root)
        except CorruptCheckpointError as error:
            fault = Fault("", f"{root}/{_commit.MANIFEST}", str(error))
            return VerifyReport(str(root), "", (), (fault,), 0, time.monotonic() - began)
        nbytes = sum(leaf.nbytes for leaf in manifest.leaves)
        faults = await _Verification(root, manifest, Progress(nbytes, on_progress)).faults()
        if not faults or await in_thread(_commit.is_current, root, manifest):
            names = tuple(leaf.name for leaf in manifest.leaves)
            return VerifyReport(str(root), manifest.attempt, names, tuple(faults), nbytes, time.monotonic() - began)


class _Verification:
    def __init__(self, root: Location, manifest: Manifest, progress: Progress) -> None:
        self._root = root
        self._manifest = manifest
        self._data = root.child(manifest.data)
        self._reader = Reader(default_host_bytes(), verify=True, memory_map=False, progress=progress)
        self._faults: list[Fault] = []
        self._taken: dict[str, int] = {}

    async def faults(self) -> list[Fault]:
        indexes = await in_thread(self._indexes)
        stored = await in_thread(self._by_leaf, indexes)
        wanted = [
            found
            for number, leaf in enumerate(self._manifest.leaves)
            if leaf.kind != "value" and (found := self._sound(leaf, stored.get(number, ())))
        ]
        self._faults.extend(await self._reader.find_faults(wanted))
        await in_thread(self._check_files, indexes)
        return await in_thread(_with_sharers, self._root, self._data, self._faults) if self._faults else []

    def _indexes(self) -> list[Index]:
        found: list[Index] = []
        for file in self._manifest.indexes:
            try:
                found.append(_commit.read_index(self._data, file))
            except CheckpointError as error:
                self._add("", file.name, error)
        return found

    def _by_leaf(self, indexes: Sequence[Index]) -> dict[int, list[Stored]]:
        try:
            return _reader.by_leaf([(index, self._data) for index in indexes], str(self._data))
        except CorruptCheckpointError as error:
            self._add("", "", error)
            return {}

    def _sound(self, leaf: Leaf, pieces: Sequence[Stored]) -> Wanted | None:
        """What of `leaf` to read, or None where its records are wrong."""
        dtype = dtype_named(leaf.dtype)
        try:
            _reader.check(leaf.name, leaf.shape, dtype, pieces, self._taken)
        except CorruptCheckpointError as error:
            self._add(leaf.name, "", error)
            return None
        return Wanted(leaf.name, leaf.shape, dtype, (), pieces)

    def _check_files(self, indexes: Sequence[Index]) -> None:
        """Files that no piece covers, missing ones that hold no data, and surplus ones."""
        leaves = {f"arrays/{leaf.name}/{METADATA}": leaf.name for leaf in self._manifest.leaves}
        listed = {file.name for file in self._manifest.indexes}
        for index in indexes:
            used = {piece.file for piece in index.pieces}
            listed.update(file.name for file in index.files)
            for number, file in enumerate(index.files):
                if file.hash is not None or number not in used:
                    self._check_file(leaves.get(file.name, ""), file)
        if len(indexes) == len(self._manifest.indexes):  # a damaged index lists nothing
            for name in sorted(self._data.files().keys() - listed):
                self._add("", name, "no record names this file")

    def _check_file(self, leaf: str, file: File) -> None:
        try:
            self._data.check_size(file.name, file.nbytes)
            if file.hash is not None and digest(self._data.read(file.name)) != file.hash:
                self._add(leaf, file.name, "the file does not match its hash; it was altered")
        except CheckpointNotFoundError:
            self._add(leaf, file.name, "the file is missing")
        except CheckpointError as error:
            self._add(leaf, file.name, error)

    def _add(self, leaf: str, name: str, problem: CheckpointError | str) -> None:
        file = str(self._data.child(name))
        if isinstance(problem, str):
            problem = f"leaf {leaf}: {file}: {problem}" if leaf else f"{file}: {problem}"
        self._faults.append(Fault(leaf, file, str(problem)))


def _with_sharers(root: Location, data: Location, faults: Sequence[Fault]) -> list[Fault]:
    """The faults, each with the checkpoints beside this one that share the bad file by a hard link."""
    if not root.is_directory(data.name):
        return list(faults)
    files = {str(data.child(name)): stat.identity for name, stat in data.files().items() if stat.links > 1}
    bad = {files[fault.file] for fault in faults if fault.file in files}
    sharers: dict[tuple[int, int], list[str]] = defaultdict(list)
    for sibling in root.siblings() if bad else ():
        for identity in bad & {stat.identity for stat in sibling.files().values()}:
            sharers[identity].append(str(sibling))
    return [
        replace(fault, problem=f"{fault.problem} (shared with {', '.join(shared)})")
        if (shared := sharers.get(files.get(fault.file, (0, 0))))
        else fault
        for fault in faults
    ]
