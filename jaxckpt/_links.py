"""What has not changed since an earlier checkpoint, by its hashes, is hard-linked from there instead of written."""

import os
import threading

import jax
from msgspec import Struct

from jaxckpt._location import Location
from jaxckpt._manifest import File
from jaxckpt._shards import Slice
from jaxckpt._store import Layout, pack_layout


class Known(Struct, frozen=True, gc=False):
    """Where an earlier checkpoint holds a piece: its file, the offset in that, and the hashes."""

    file: File
    offset: int
    hashes: list[str]


class Links:
    """The files of an earlier checkpoint that the new one can share.

    Args:
        base: The data directory of the earlier checkpoint.
        pieces: What is there of the leaves that are being saved, by the number of the leaf and the box.
        data: The data directory of the new checkpoint.

    Attributes:
        packs: The packs that were linked.
    """

    def __init__(self, base: Location, pieces: dict[tuple[int, Slice], Known], data: Location) -> None:
        self._base = base
        self._pieces = pieces
        self._data = data
        self._lock = threading.Lock()
        self._files: dict[str, File | None] = {}
        self.packs: list[Layout] = []

    def has(self, leaf: int, box: Slice) -> bool:
        """Whether the earlier checkpoint holds the same box of a leaf, changed or not."""
        return (leaf, box) in self._pieces

    def chunk(self, leaf: int, box: Slice, layout: Layout, hashes: list[str]) -> bool:
        """Link the file of a chunk that has not changed; whether it has not, and could be."""
        known = self._pieces[leaf, box]
        if known.hashes != hashes or known.offset != 0 or known.file.nbytes != layout.chunk_nbytes:
            return False
        return self._link(layout, box, known.file)

    def packed(self, leaf: int, box: Slice, hashes: list[str]) -> tuple[File, int] | None:
        """The linked file and the offset in it of a piece that has not changed; None where it has, or cannot be."""
        known = self._pieces.get((leaf, box))
        if known is None or known.hashes != hashes:
            return None
        with self._lock:  # a file has many members, and is linked once
            if known.file.name not in self._files:
                self._files[known.file.name] = self._pack(known.file)
            file = self._files[known.file.name]
        return None if file is None else (file, known.offset)

    def _pack(self, file: File) -> File | None:
        layout = pack_layout(self._data, f"{jax.process_index()}-linked-{len(self._files)}", file.nbytes)
        if not self._link(layout, Slice((0,), (file.nbytes,)), file):
            return None
        self.packs.append(layout)
        return File(name=layout.file((0,)), nbytes=file.nbytes)

    def _link(self, layout: Layout, box: Slice, file: File) -> bool:
        layout.location.make()
        return layout.location.link(os.path.basename(layout.file(box.start)), self._base, file.name)
