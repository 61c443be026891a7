"""Save and restore JAX arrays: fast, whole or not at all, every byte checked."""

from jaxckpt._api import (
    async_deserialize,
    async_serialize,
    copy,
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
from jaxckpt._checkpointer import AsyncCheckpointer, Checkpointer, PendingStep, StepStats
from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeafMismatchError,
    PeerError,
    SaveTimeoutError,
    StorageError,
    UnsettledCommitError,
    UnsupportedLeafError,
)
from jaxckpt._gc import GcReport
from jaxckpt._info import CheckpointInfo
from jaxckpt._manifest import Leaf
from jaxckpt._options import RestoreOptions, SaveOptions
from jaxckpt._put import put_sharded
from jaxckpt._reader import Fault
from jaxckpt._retention import KeepBest, young_daly_seconds
from jaxckpt._sync import PendingSave
from jaxckpt._verify import VerifyReport

__all__ = [
    "AsyncCheckpointer",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "Checkpointer",
    "CorruptCheckpointError",
    "Fault",
    "GcReport",
    "KeepBest",
    "Leaf",
    "LeafMismatchError",
    "PeerError",
    "PendingSave",
    "PendingStep",
    "RestoreOptions",
    "SaveOptions",
    "SaveTimeoutError",
    "StepStats",
    "StorageError",
    "UnsettledCommitError",
    "UnsupportedLeafError",
    "VerifyReport",
    "async_deserialize",
    "async_serialize",
    "copy",
    "delete",
    "describe",
    "gc",
    "put_sharded",
    "restore",
    "restore_async",
    "save",
    "save_async",
    "start_save",
    "verify",
    "young_daly_seconds",
]
