"""How to save and how to restore: two frozen dataclasses, validated once, when made."""

import os
from dataclasses import dataclass
from typing import Literal, get_args

Transfer = Literal["auto", "pinned", "direct", "staged"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How arrays leave the devices and what the files look like.

    Args:
        transfer: How a shard comes to the host. `pinned`: one `device_put` into
            pinned host memory. `direct`: a zero-copy view, for devices whose
            memory is the host's. `staged`: pieces through a fixed buffer. `auto`:
            `direct` on CPU devices, `pinned` on others, `staged` for what does
            not fit.
        max_host_bytes: The most host memory, in bytes, that copies of array data
            occupy at any time. None: a quarter of the memory available when the
            save starts. It never grows.
        pack_below_bytes: Shards smaller than this share large files (packs);
            others get a Zarr array of their own.
        chunk_bytes: The largest chunk, and so file, that a shard is divided into.
        timeout_seconds: A save that takes longer raises `SaveTimeoutError`, which
            says what it leaves. None: no limit.
        process_timeout_seconds: In a program of several processes, how long each one
            waits for the others once its own work is done, before `SaveTimeoutError`
            names those that are missing.
        verify_after_save: Read everything back and compare it with its hashes before the
            checkpoint is committed: what a network or a disk has altered is not saved.
        trace_directory: Where each save leaves a file that https://ui.perfetto.dev shows:
            when each shard was transferred, hashed and written. None: nowhere.

    Raises:
        ValueError: A value is out of range; the message names the option.
    """

    transfer: Transfer = "auto"
    max_host_bytes: int | None = None
    pack_below_bytes: int = 4 * MIB
    chunk_bytes: int = 128 * MIB
    timeout_seconds: float | None = 3600.0
    process_timeout_seconds: float = 600.0
    verify_after_save: bool = False
    trace_directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.transfer not in get_args(Transfer):
            raise ValueError(f"transfer is {self.transfer!r}; expected one of {', '.join(get_args(Transfer))}")
        if self.max_host_bytes is not None:
            _check_at_least("max_host_bytes", self.max_host_bytes, MIB)
        _check_at_least("pack_below_bytes", self.pack_below_bytes, 0)
        _check_at_least("chunk_bytes", self.chunk_bytes, 4096)
        _check_positive("timeout_seconds", self.timeout_seconds)
        if self.process_timeout_seconds is None:
            raise ValueError("process_timeout_seconds is None; expected a number of seconds")
        _check_positive("process_timeout_seconds", self.process_timeout_seconds)
        _check_bools(self, "verify_after_save")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """How stored arrays come back.

    Args:
        verify: Compare every block that is read with its xxh3-128 hash.
        memory_map: On CPU devices, map the files instead of reading them, so that
            arrays share the page cache and restoring takes microseconds. It trusts
            the files to stay unchanged for as long as the arrays live; with
            `verify` the bytes are checked once, at restore.
        max_host_bytes: The most host memory, in bytes, beside the restored arrays.
            None: a quarter of the memory available when the restore starts.
        cast: Convert a leaf whose dtype differs from `like`, which is an error
            otherwise.
        partial: Allow `like` to name only some of the saved leaves.
        timeout_seconds: A restore that takes longer raises `SaveTimeoutError`.
            None: no limit.

    Raises:
        ValueError: A value is out of range; the message names the option.
    """

    verify: bool = True
    memory_map: bool = False
    max_host_bytes: int | None = None
    cast: bool = False
    partial: bool = False
    timeout_seconds: float | None = 3600.0

    def __post_init__(self) -> None:
        if self.max_host_bytes is not None:
            _check_at_least("max_host_bytes", self.max_host_bytes, MIB)
        _check_positive("timeout_seconds", self.timeout_seconds)
        _check_bools(self, "verify", "memory_map", "cast", "partial")


def _check_at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected a whole number of bytes")
    if value < least:
        raise ValueError(f"{name} is {value}; expected at least {least} bytes")


def _check_bools(options: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(options, name), bool):
            raise ValueError(f"{name} is {getattr(options, name)!r}; expected True or False")


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not (isinstance(value, int | float) and value > 0):
        raise ValueError(f"{name} is {value!r}; expected more than 0 seconds, or None for no limit")
