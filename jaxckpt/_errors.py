"""The exceptions that jaxckpt raises.

Each one is a `CheckpointError` and also the builtin that a caller would
naturally catch, so `except FileNotFoundError` works without importing ours.
"""


class CheckpointError(Exception):
    """Base of every error that jaxckpt raises on purpose."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint or array at the path."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The path already holds a checkpoint, an array or somebody else's files."""


class LeafMismatchError(CheckpointError, ValueError):
    """A leaf is not what was asked for: its dtype, shape, kind or place in the tree."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """A leaf, or a key of the tree, is of a type that a checkpoint cannot hold."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """Stored bytes are missing, truncated, altered or not what they claim to be."""


class StorageError(CheckpointError, OSError):
    """The storage refused: no space, no permission, an I/O error. `errno` tells which."""


class UnsettledCommitError(StorageError):
    """An object store did not answer the commit of a save, and does not tell whether it happened.

    What is at the path is the new checkpoint or what was there before, whole; where a
    connection alters every commit, and the store does not notice, it is a damaged manifest
    that every reader refuses. The data of both stay.
    """


class SaveTimeoutError(CheckpointError, TimeoutError):
    """A save or restore did not end within `timeout_seconds`.

    A save left no checkpoint, unless the storage hung in the commit itself: once it works
    again, what was there before is there, or the new checkpoint, whole.
    """


class PeerError(CheckpointError, RuntimeError):
    """Another process of the program failed in a save that all make together; nothing was committed."""

    def __init__(self, process: int, reason: str) -> None:
        super().__init__(f"process {process} failed, so nothing was saved: {reason}")
        self.process = process
        self.reason = reason
