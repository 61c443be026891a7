"""Save and restore JAX arrays: fast, whole or not at all, every byte checked."""

from jaxckpt._api import (
    async_deserialize,
    async_serialize,
    describe,
    restore,
    restore_async,
    save,
    save_async,
    start_save,
)
from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    SaveTimeoutError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt._info import CheckpointInfo
from jaxckpt._manifest import Leaf
from jaxckpt._options import RestoreOptions, SaveOptions
from jaxckpt._sync import PendingSave

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "Leaf",
    "LeafMismatchError",
    "PendingSave",
    "RestoreOptions",
    "SaveOptions",
    "SaveTimeoutError",
    "StorageError",
    "UnsupportedLeafError",
    "async_deserialize",
    "async_serialize",
    "describe",
    "restore",
    "restore_async",
    "save",
    "save_async",
    "start_save",
]
