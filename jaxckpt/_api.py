"""The public calls, blocking and awaitable: each checks its arguments and runs one coroutine."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax

from jaxckpt import _arrays, _commit, _copy, _gc, _restore, _save, _verify
from jaxckpt._errors import LeafMismatchError
from jaxckpt._gc import GcReport
from jaxckpt._info import CheckpointInfo
from jaxckpt._location import Location, PathLike, parse
from jaxckpt._manifest import to_json
from jaxckpt._options import RestoreOptions, SaveOptions
from jaxckpt._processes import Conversation, next_number
from jaxckpt._sync import PendingSave, Running, raise_lost_failure
from jaxckpt._transfer import Placement
from jaxckpt._tree import Flat, display, flatten
from jaxckpt._verify import VerifyReport

Report = Callable[[int, int], None]
StorageOptions = Mapping[str, Any]
Options = TypeVar("Options", SaveOptions, RestoreOptions)


def save(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    base: PathLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    local_data: Any = None,
    options: SaveOptions | None = None,
    storage_options: StorageOptions | None = None,
    on_progress: Report | None = None,
) -> CheckpointInfo:
    """Save a pytree as a checkpoint; it is durable when this returns.

    All or nothing: the checkpoint exists from the moment its `manifest.json` is put,
    atomically and last; a crash before that leaves what was there before, also when an
    old checkpoint is being overwritten. Data, manifest and every new directory are
    fsynced, so what this returned for survives a power cut. No other thread may change
    numpy leaves meanwhile (`start_save` copies them).

    In a program of several processes (`jax.distributed`) each calls it with the same tree
    and a path on storage that they share, all their saves in the same order. Each writes
    its share of what it holds; it returns, or raises, in all of them. Of what is not one
    array of all processes (numpy arrays, local jax.Arrays), that of process 0 is saved.

    Args:
        path: A directory, or the prefix of an `s3://`, `gs://` or `memory://` URL, that does
            not exist, is empty, or holds a checkpoint.
        tree: A pytree of jax.Array, numpy arrays and scalars, typed PRNG keys, and
            Python int, float, complex, bool, str; None is part of the structure.
        overwrite: Replace the checkpoint that is at `path`.
        base: An earlier checkpoint on the same file system. What has not changed since, by
            its hashes, is hard-linked from there, not written. The new checkpoint stays
            complete when the earlier one is deleted, but a damaged file damages both.
        metadata: What to keep beside the tree, in the same commit: JSON, bytes allowed.
            `describe(path).metadata` has it. Of several processes, that of process 0.
        local_data: The same, but of each process, such as the state of its data loader:
            `describe(path).local_data[jax.process_index()]`.
        options: See `SaveOptions`.
        storage_options: How to reach an object store: for S3 `key`, `secret`, `token`,
            `profile`, `anon`, `endpoint_url`, `region`, for Google `anon`, `endpoint_url`,
            for both `retry_seconds`, `single_writer`. What is missing comes from the
            environment variables of the AWS and Google tools.
        on_progress: Called as `on_progress(done_bytes, total_bytes)` from another thread.

    Returns:
        What was saved.

    Raises:
        CheckpointExistsError: There is a checkpoint already, or other files.
        UnsupportedLeafError: A leaf or a dict key cannot be saved; nothing was written.
        StorageError: The storage failed; the old checkpoint, if any, is as it was. Or it is
            an object store that ignores the conditions of a put, and cannot hold checkpoints.
        UnsettledCommitError: An object store does not tell whether the commit happened.
        SaveTimeoutError: It took longer than `options.timeout_seconds`, or a process did
            not arrive; names it.
        PeerError: Another process failed; names it and its reason.

    Example:
        >>> import jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("checkpoints/a", {"w": jnp.ones((4, 4))})
        >>> jaxckpt.restore("checkpoints/a")["w"].sum()
        Array(16., dtype=float32)
    """
    return _start(
        path,
        _Wish(tree, overwrite, base, metadata, local_data, options, storage_options, on_progress),
        copy_numpy=False,
    ).wait()


async def save_async(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    base: PathLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    local_data: Any = None,
    options: SaveOptions | None = None,
    storage_options: StorageOptions | None = None,
    on_progress: Report | None = None,
) -> CheckpointInfo:
    """`save`, awaitable. The caller's event loop is never blocked.

    Cancelling the awaiting task stops the save, which then leaves no checkpoint and no
    task. Arguments, guarantees and errors are those of `save`.
    """
    return await _start(
        path, _Wish(tree, overwrite, base, metadata, local_data, options, storage_options, on_progress)
    ).wait_async()


def start_save(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    base: PathLike | None = None,
    metadata: Mapping[str, Any] | None = None,
    local_data: Any = None,
    options: SaveOptions | None = None,
    storage_options: StorageOptions | None = None,
    on_progress: Report | None = None,
) -> PendingSave:
    """Begin to save a pytree; returns as soon as the tree is captured.

    From then on the caller may donate, delete or overwrite every array in `tree`: device
    arrays are held or copied, numpy arrays are copied. That takes host memory within
    `options.max_host_bytes`; what exceeds it is written first.

    Returns:
        A handle: `result()`, `await`, or a `with` block that waits at its end.

    Raises:
        As `save`, for what is found before the tree is captured; later failures are
        raised by the handle. Also the failure of an earlier background save that
        nobody has collected.
    """
    captured = threading.Event()
    wish = _Wish(tree, overwrite, base, metadata, local_data, options, storage_options, on_progress)
    running = _start(path, wish, captured=captured.set)
    running.future.add_done_callback(lambda _: captured.set())
    try:
        captured.wait()
    except BaseException:
        running.cancel()
        raise
    if running.failure() is not None:
        running.result()
    return PendingSave(running)


def restore(
    path: PathLike,
    like: Any = None,
    *,
    options: RestoreOptions | None = None,
    storage_options: StorageOptions | None = None,
    on_progress: Report | None = None,
) -> Any:
    """Restore the pytree that was saved at `path`.

    Every block that is read is compared with its hash (unless `options.verify` is off).
    A reader that is overtaken by an overwrite starts again on the new checkpoint.

    Args:
        path: Where the checkpoint is.
        like: What to restore to: a tree of the same structure whose leaves are
            jax.Array, jax.ShapeDtypeStruct (with or without a sharding), Sharding, numpy
            arrays or Python values. Leaves are matched by their path. Shapes and dtypes
            must be those that were saved; shardings may be any.
            None: dicts, lists, tuples and namedtuples are rebuilt (other registered
            nodes become dicts of their fields), numpy leaves are numpy again, and
            jax.Arrays are put on the default device.
        options: See `RestoreOptions`.
        on_progress: Called as `on_progress(done_bytes, total_bytes)` from another thread.

    Returns:
        The tree.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `path`.
        CorruptCheckpointError: Something is missing or altered; names leaf and file.
        LeafMismatchError: `like` has another dtype, shape or leaf than was saved.
        StorageError: The storage failed.
    """
    return _start_restore(path, like, options, storage_options, on_progress).wait()


async def restore_async(
    path: PathLike,
    like: Any = None,
    *,
    options: RestoreOptions | None = None,
    storage_options: StorageOptions | None = None,
    on_progress: Report | None = None,
) -> Any:
    """`restore`, awaitable. The caller's event loop is never blocked."""
    return await _start_restore(path, like, options, storage_options, on_progress).wait_async()


def describe(path: PathLike, *, storage_options: StorageOptions | None = None) -> CheckpointInfo:
    """What is in the checkpoint at `path`, from its manifest alone.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `path`.
        CorruptCheckpointError: The manifest was altered.
    """
    return _restore.describe(parse(path, storage_options))


def verify(
    path: PathLike, *, storage_options: StorageOptions | None = None, on_progress: Report | None = None
) -> VerifyReport:
    """Read all that is stored of the checkpoint at `path` and compare it with its hashes, on all cores.

    Nothing is put on a device and no result is kept, so a checkpoint of any size can be
    verified. All faults are found, not only the first. A checkpoint that is overwritten
    meanwhile is verified again from its new beginning.

    Args:
        path: Where the checkpoint is.
        on_progress: Called as `on_progress(done_bytes, total_bytes)` from another thread.

    Returns:
        A report: `report.ok`, `report.faults`, `report.by_leaf()`. Damaged blocks, missing
        files, files of a wrong size and files that no record names are faults.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `path`.

    Example:
        >>> import jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("checkpoints/v", {"w": jnp.ones((4, 4))})
        >>> jaxckpt.verify("checkpoints/v").ok
        True
    """
    root = parse(path, storage_options)
    return Running(partial(_verify.verify, root, on_progress), None, "verification").wait()


def copy(
    source: PathLike,
    dest: PathLike,
    *,
    overwrite: bool = False,
    storage_options: StorageOptions | None = None,
    dest_storage_options: StorageOptions | None = None,
    on_progress: Report | None = None,
) -> CheckpointInfo:
    """Copy a checkpoint to another path, on the same storage or any other.

    Every file is compared with its hashes before the copy exists, which it does, all or
    nothing, when its `manifest.json` is put last. A copy that was broken off goes on
    where it was when it is made again: what is there already is checked, not copied.
    Between two paths of one object store the service copies by itself, and the result is
    read and checked. A destination that has the same checkpoint already is left alone.

    Args:
        source: Where the checkpoint is. One that is overwritten meanwhile is begun again.
        dest: A directory or prefix that does not exist, is empty, or holds a checkpoint.
        overwrite: Replace the checkpoint that is at `dest`.
        storage_options, dest_storage_options: Of the two, as for `save`.
        on_progress: Called as `on_progress(done_bytes, total_bytes)` from another thread.

    Returns:
        What is at `dest` now.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `source`.
        CheckpointExistsError: There is another one at `dest`, or other files.
        CorruptCheckpointError: A file of the source is damaged; names it.
        StorageError: One of the storages failed.
    """
    places = parse(source, storage_options), parse(dest, dest_storage_options)
    return Running(partial(_copy.copy, *places, overwrite=overwrite, on_progress=on_progress), None, "copy").wait()


def delete(path: PathLike, *, storage_options: StorageOptions | None = None) -> None:
    """Remove the checkpoint at `path`.

    Its manifest goes first, durably, so a crash at any instant leaves the checkpoint
    whole or not at all. Only what the manifest names is removed; links are not followed.
    What a crash leaves of the data is invisible, and `gc` removes it. Neither a save to
    the same path that is in progress nor other files there are touched.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at `path`.
        StorageError: The storage failed.
    """
    _commit.delete(parse(path, storage_options))


def gc(
    root: PathLike,
    *,
    grace_seconds: float = 3600.0,
    dry_run: bool = False,
    storage_options: StorageOptions | None = None,
) -> GcReport:
    """Remove what killed saves have left in the checkpoints at and below `root`.

    Removed are data directories that no manifest names, and temporary files of a commit.
    They stay if a save of a process on this machine is writing them, if anything in them
    changed less than `grace_seconds` ago, if the manifest beside them cannot be read, or
    if they hold anything that a checkpoint does not. Links are never followed.

    Args:
        root: A checkpoint, or a directory with checkpoints anywhere below it.
        grace_seconds: How long ago the last change must be. It protects saves of other
            machines, which on shared storage cannot be seen.
        dry_run: Only report what would be removed.

    Returns:
        The paths that were removed, and those that were kept with the reason.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        StorageError: The storage failed.
    """
    if not (isinstance(grace_seconds, int | float) and grace_seconds >= 0):
        raise ValueError(f"grace_seconds is {grace_seconds!r}; expected 0 or more seconds")
    return _gc.gc(parse(root, storage_options), grace_seconds, dry_run=dry_run)


async def async_serialize(
    arrays: Any,
    paths: Any,
    *,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    storage_options: StorageOptions | None = None,
) -> None:
    """Write each array to its path as one plain Zarr v3 array; all are durable when this returns.

    Shards of all arrays are in flight together, within `options.max_host_bytes`, and the
    caller's event loop is never blocked. An array exists when its `zarr.json` does, which
    is put atomically, after its chunks; its attributes hold the hash of every block.
    zarr-python and TensorStore open it; dtypes outside of Zarr's core, such as bfloat16,
    are stored bit for bit as unsigned integers.

    Args:
        arrays: A pytree of jax.Array or numpy arrays.
        paths: A pytree of the same structure, or a sequence in the same order, of str,
            PathLike or URL.
        overwrite: Remove the arrays that are at `paths` first. A crash then leaves
            neither old nor new; use `save` where that matters.
        options: See `SaveOptions`; nothing is packed.

    Raises:
        CheckpointExistsError: A path already holds an array, or other files.
        UnsupportedLeafError, StorageError, SaveTimeoutError: As `save`.
        ValueError: `arrays` and `paths` do not match.

    Source: https://github.com/jax-ml/jax/pull/22114, and `jax.experimental.array_serialization`.
    """
    number = next_number()
    raise_lost_failure()
    flat = flatten(arrays)
    targets = _locations(paths, flat, storage_options)
    chosen = _checked(options, SaveOptions)
    request = _save.Request(chosen, overwrite, Conversation(number, chosen.process_timeout_seconds))
    labels = [display(path) for path in flat.paths]
    work = partial(_arrays.save_arrays, targets, flat.leaves, labels, request)
    await Running(work, chosen.timeout_seconds, "save").wait_async()


async def async_deserialize(
    paths: Any,
    like: Any,
    *,
    options: RestoreOptions | None = None,
    storage_options: StorageOptions | None = None,
) -> Any:
    """Read arrays that `async_serialize` wrote, onto any sharding.

    Args:
        paths: A pytree, or a sequence, of str, PathLike or URL.
        like: A pytree of matching leaves: Sharding, jax.ShapeDtypeStruct, jax.Array or
            numpy arrays.
        options: See `RestoreOptions`.

    Returns:
        The arrays, in the structure of `like`.

    Raises:
        CheckpointNotFoundError: There is no array at a path.
        CorruptCheckpointError, LeafMismatchError, StorageError: As `restore`.
        ValueError: `paths` and `like` do not match.
    """
    flat = flatten(like)
    places = _locations(paths, flat, storage_options)
    chosen = _checked(options, RestoreOptions)
    request = _restore.Request(chosen, Placement.of_this_thread())
    labels = [str(place) for place in places]
    work = partial(_arrays.restore_arrays, places, flat.leaves, labels, request)
    values = await Running(work, chosen.timeout_seconds, "restore").wait_async()
    return jax.tree_util.tree_unflatten(flat.treedef, values)


class _Wish(NamedTuple):
    """The arguments that all calls share which save a tree."""

    tree: Any
    overwrite: bool
    base: PathLike | None
    metadata: Mapping[str, Any] | None
    local_data: Any
    options: SaveOptions | None
    storage_options: StorageOptions | None
    on_progress: Report | None


def _start(
    path: PathLike, wish: _Wish, *, copy_numpy: bool = True, captured: Callable[[], None] = lambda: None
) -> Running[CheckpointInfo]:
    number = next_number()
    raise_lost_failure()
    options = _checked(wish.options, SaveOptions)
    request = _save.Request(
        options,
        wish.overwrite,
        Conversation(number, options.process_timeout_seconds),
        on_progress=wish.on_progress,
        metadata=to_json(dict(wish.metadata or {}), "metadata"),
        local_data=to_json(wish.local_data, "local_data"),
        base=parse(wish.base, wish.storage_options) if wish.base is not None else None,
        copy_numpy=copy_numpy,
        captured=captured,
    )
    root = parse(path, wish.storage_options)
    return Running(partial(_save.save, root, wish.tree, request), options.timeout_seconds, "save")


def agreed(value: bool) -> bool:
    """The value of process 0, in every process; all must ask in the same order as they save."""
    talk = Conversation(next_number(), SaveOptions().process_timeout_seconds)
    return value if talk.count == 1 else Running(partial(talk.agreed, value), None, "agreement").wait()


def _start_restore(
    path: PathLike,
    like: Any,
    options: RestoreOptions | None,
    storage_options: StorageOptions | None,
    on_progress: Report | None,
) -> Running[Any]:
    chosen = _checked(options, RestoreOptions)
    request = _restore.Request(chosen, Placement.of_this_thread(), on_progress)
    root = parse(path, storage_options)
    return Running(partial(_restore.restore, root, like, request), chosen.timeout_seconds, "restore")


def _locations(paths: Any, flat: Flat, storage_options: StorageOptions | None) -> list[Location]:
    found = flatten(paths)
    in_order = isinstance(paths, list | tuple) and all(len(path) == 1 for path in found.paths)
    if len(found.leaves) != len(flat.leaves):
        raise LeafMismatchError(
            f"there are {len(flat.leaves)} arrays but {len(found.leaves)} paths; expected one path for each array"
        )
    if not in_order and found.paths != flat.paths:
        differs = next(pair for pair in zip(flat.paths, found.paths, strict=True) if pair[0] != pair[1])
        raise LeafMismatchError(
            f"the trees differ: there is an array at {display(differs[0])} but a path at {display(differs[1])}; "
            "expected the same structure, or a list of paths"
        )
    return [parse(path, storage_options) for path in found.leaves]


def _checked(options: Options | None, kind: type[Options]) -> Options:
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise TypeError(f"options is a {type(options).__name__}; expected {kind.__name__}")
    return options
