"""One Zarr array: where its chunks are, its metadata, and its hashes; written through TensorStore.

Reading does not go through TensorStore: chunks are raw bytes, so a box of a chunk is a
byte range that is read straight into the array it becomes. A `zarr.json` that somebody
altered is never interpreted, and a bad disk is an OSError rather than the SIGBUS that
TensorStore's memory-mapped mode (the only one as fast) would die of.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from jaxckpt import _tensorstore
from jaxckpt._location import Location
from jaxckpt._manifest import digest, zarr_dtype
from jaxckpt._shards import Shape, Slice, blocks
from jaxckpt._tensorstore import Context

METADATA = "zarr.json"


@dataclass(frozen=True, slots=True)
class Layout:
    """A Zarr array on the storage: its directory, the name that records give it, and its grid."""

    location: Location
    name: str
    shape: Shape
    dtype: np.dtype[Any]
    chunk: Shape

    def file(self, start: Shape) -> str:
        """The recorded name of the chunk at `start`."""
        return os.path.join(self.name, chunk_file(start, self.chunk))

    @property
    def chunk_nbytes(self) -> int:
        """The size of every chunk file; one at the end of an axis is padded to it."""
        return math.prod(self.chunk) * self.dtype.itemsize

    def metadata(self, attributes: dict[str, Any] | None = None) -> bytes:
        return zarr_json(self.shape, self.dtype, self.chunk, attributes)


def pack_layout(root: Location, name: str, nbytes: int) -> Layout:
    """The Zarr array of a pack of `nbytes`, for the checkpoint whose data are below `root`."""
    name = f"packs/{name}"
    return Layout(root.child(name), name, (nbytes,), np.dtype(np.uint8), (nbytes,))


def zarr_json(shape: Shape, dtype: np.dtype[Any], chunk: Shape, attributes: dict[str, Any] | None = None) -> bytes:
    """The metadata of a plain, uncompressed Zarr v3 array.

    Source: Zarr core specification v3, https://zarr-specs.readthedocs.io/en/latest/v3/core/
    """
    return msgspec.json.format(msgspec.json.encode(_metadata(shape, dtype, chunk, attributes)), indent=2) + b"\n"


def chunk_file(start: Shape, chunk: Shape) -> str:
    """The name, in the array's directory, of the chunk that starts at `start`."""
    return ".".join(["c", *(str(at // n) for at, n in zip(start, chunk, strict=True))])


async def open_array(layout: Layout, shared: Context) -> Any:
    """Open an array for writing without touching the storage: its `zarr.json` is written by whoever commits it."""
    metadata = _metadata(layout.shape, layout.dtype, layout.chunk, None)
    return await _tensorstore.open_array(layout.location.kvstore, metadata, layout.location.path, shared)


async def write(array: Any, box: Slice, data: np.ndarray[Any, Any], layout: Layout) -> None:
    """Write `data` as the box `box` of an array, whole chunks; durable on return, but for its directories.

    `data` must not change before this returns.
    """
    await _tensorstore.write_array(
        array,
        box.index,
        data.view(zarr_dtype(data.dtype)),
        layout.location.child(chunk_file(box.start, layout.chunk)).path,
        keeps=layout.location.keeps_written_data,
        retry_seconds=layout.location.retry_seconds,
    )


def hashes(raw: np.ndarray[Any, Any], shape: Shape, itemsize: int) -> list[str]:
    """The hash of every block of a C-ordered array, from its bytes."""
    found = blocks(shape, itemsize)
    if len(found) == 1:
        return [digest(raw)]
    return [digest(raw[block.offset : block.offset + block.nbytes]) for block in found]


def as_bytes(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of a C-contiguous array, without a copy."""
    return data.reshape(-1).view(np.uint8)


def _metadata(shape: Shape, dtype: np.dtype[Any], chunk: Shape, attributes: dict[str, Any] | None) -> dict[str, Any]:
    stored = zarr_dtype(dtype)
    zero: Any = {"b": False, "c": [0.0, 0.0]}.get(stored.kind, 0)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": stored.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": zero,
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}} if stored.itemsize > 1 else {"name": "bytes"}
        ],
        **({"attributes": attributes} if attributes else {}),
    }
