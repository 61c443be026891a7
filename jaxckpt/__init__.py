"""Save and restore JAX arrays: fast, whole or not at all, every byte checked."""

from jaxckpt._api import (
    async_deserialize,
    async_serialize,
    delete,
    describe,
    gc,
    restore,
    restore_async,
    save,
    save_async,
    start_save,
    verify,
)
from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    PeerError,
    SaveTimeoutError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt._gc import GcReport
from jaxckpt._info import CheckpointInfo
from jaxckpt._manifest import Leaf
from jaxckpt._options import RestoreOptions, SaveOptions
from jaxckpt._reader import Fault
from jaxckpt._sync import PendingSave
from jaxckpt._verify import VerifyReport

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "Fault",
    "GcReport",
    "Leaf",
    "LeafMismatchError",
    "PeerError",
    "PendingSave",
    "RestoreOptions",
    "SaveOptions",
    "SaveTimeoutError",
    "StorageError",
    "UnsupportedLeafError",
    "VerifyReport",
    "async_deserialize",
    "async_serialize",
    "delete",
    "describe",
    "gc",
    "restore",
    "restore_async",
    "save",
    "save_async",
    "start_save",
    "verify",
]
