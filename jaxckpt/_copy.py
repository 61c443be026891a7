"""A checkpoint from one storage to another, file by file, every block checked on the way."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxckpt import _commit, _reader
from jaxckpt._budget import Budget, Progress, default_host_bytes
from jaxckpt._commit import Attempt
from jaxckpt._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from jaxckpt._info import CheckpointInfo, info
from jaxckpt._location import Location
from jaxckpt._manifest import File, Index, Leaf, Manifest, digest, dtype_named
from jaxckpt._reader import Stored
from jaxckpt._shards import blocks
from jaxckpt._tasks import Tasks, clean_up, each_in_thread, in_thread
from jaxckpt._transfer import host_bytes


async def copy(
    source: Location, dest: Location, *, overwrite: bool, on_progress: Callable[[int, int], None] | None
) -> CheckpointInfo:
    """Copy the checkpoint at `source` to `dest`. One that is overwritten meanwhile is begun again."""
    while True:
        manifest = await in_thread(_commit.read, source)
        if await in_thread(_commit.is_current, dest, manifest):
            return info(dest, manifest)
        try:
            await _copy(source, dest, manifest, overwrite=overwrite, on_progress=on_progress)
            return info(dest, manifest)
        except (CorruptCheckpointError, CheckpointNotFoundError):
            if await in_thread(_commit.is_current, source, manifest):
                raise


async def _copy(
    source: Location,
    dest: Location,
    manifest: Manifest,
    *,
    overwrite: bool,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    # Under the same id: what an earlier copy has left is found again.
    attempt = Attempt(dest, overwrite=overwrite, id=manifest.attempt, created=manifest.created)
    try:
        await in_thread(attempt.begin)
        copying = _Copying(source.child(manifest.data), attempt.data)
        files = await in_thread(copying.plan, manifest)
        await copying.run(files, Progress(sum(file.nbytes for file in files), on_progress))
        await each_in_thread(attempt.sync, attempt.directories(file.record for file in files))
        await in_thread(attempt.publish, manifest)
    except BaseException:
        await clean_up(attempt.abandon)
        raise


@dataclass(frozen=True, slots=True)
class _Checked:
    """A file and the hashes of it: ranges of bytes, each with its hash."""

    record: File
    hashes: list[tuple[int, int, str]]

    @property
    def nbytes(self) -> int:
        return self.record.nbytes


class _Copying:
    """The files of one checkpoint, from the data directory `source` to `dest`."""

    def __init__(self, source: Location, dest: Location) -> None:
        self._source = source
        self._dest = dest

    def plan(self, manifest: Manifest) -> list[_Checked]:
        """Every file of the checkpoint. The indexes, which name the others, are read here."""
        found = {
            index.name: _Checked(File(name=index.name, nbytes=index.nbytes), [(0, index.nbytes, index.hash)])
            for index in manifest.indexes
        }
        indexes = [_commit.read_index(self._source, record) for record in manifest.indexes]
        for file in itertools.chain.from_iterable(index.files for index in indexes):
            found[file.name] = _Checked(file, [(0, file.nbytes, file.hash)] if file.hash else [])
        for leaf, pieces in _pieces(manifest, indexes, self._source):
            itemsize = dtype_named(leaf.dtype).itemsize
            for stored in pieces:
                for block, expected in zip(blocks(stored.piece.shape, itemsize), stored.piece.hashes, strict=True):
                    start = stored.piece.offset + block.offset
                    found[stored.file.name].hashes.append((start, start + block.nbytes, expected))
        return list(found.values())

    async def run(self, files: Iterable[_Checked], progress: Progress) -> None:
        """Copy all files that are not at the destination yet, several at a time, within the memory that is free."""
        present = await in_thread(self._dest.files)
        budget = Budget(default_host_bytes())

        async def copy(file: _Checked) -> None:
            try:
                found = present.get(file.record.name)
                await in_thread(self._copy, file, found is not None, found is not None and found.nbytes == file.nbytes)
            finally:
                budget.release(_held_nbytes(file))
            progress.add(file.nbytes)

        async with Tasks() as tasks:
            for file in files:
                await budget.acquire(_held_nbytes(file))
                tasks.create_task(copy(file))

    def _copy(self, file: _Checked, exists: bool, may_be_whole: bool) -> None:
        if may_be_whole and self._is_whole(file):
            return
        if exists:
            self._dest.unlink(file.record.name)
        if self._dest.copy_from(self._source, file.record.name):
            _read(self._dest, file)
            return
        data = _read(self._source, file)
        self._dest.child(file.record.name.rpartition("/")[0]).make()
        self._dest.write(file.record.name, data)

    def _is_whole(self, file: _Checked) -> bool:
        """Whether an earlier copy has got this far, and what it has written has stayed."""
        try:
            _read(self._dest, file)
        except CheckpointError:
            return False
        return True


def _pieces(manifest: Manifest, indexes: Sequence[Index], data: Location) -> Iterator[tuple[Leaf, Sequence[Stored]]]:
    """Every array of the checkpoint and its pieces, sound records all."""
    by_leaf = _reader.by_leaf([(index, data) for index in indexes], str(data))
    taken: dict[str, int] = {}
    for number, leaf in enumerate(manifest.leaves):
        if leaf.kind != "value":
            pieces = by_leaf.get(number, [])
            _reader.check(leaf.name, leaf.shape, dtype_named(leaf.dtype), pieces, taken)
            yield leaf, pieces


def _read(location: Location, file: _Checked) -> memoryview:
    """The content of a file, compared with its hashes.

    Raises:
        CorruptCheckpointError: It is missing, or was altered.
    """
    where = f"{location}/{file.record.name}"
    data = host_bytes(file.nbytes).data
    try:
        location.read_into(file.record.name, file.nbytes, [(0, [data])])
    except CheckpointNotFoundError as error:
        raise CorruptCheckpointError(f"{where}: the file is missing") from error
    for start, end, expected in file.hashes:
        if digest(data[start:end]) != expected:
            raise CorruptCheckpointError(
                f"{where}: {end - start} bytes at {start} do not match their hash; the file was altered"
            )
    return data


def _held_nbytes(file: _Checked) -> int:
    """What the copy of a file holds: its content, and what the request to an object store has of it."""
    return 2 * file.nbytes
