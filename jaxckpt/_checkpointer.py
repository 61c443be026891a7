"""The checkpoints of a training run: numbered steps below one directory."""

import asyncio
import contextlib
import errno
import logging
import operator
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import jax
from jax.experimental import multihost_utils

from jaxckpt import _api
from jaxckpt._errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from jaxckpt._info import CheckpointInfo
from jaxckpt._location import PathLike
from jaxckpt._options import RestoreOptions, SaveOptions
from jaxckpt._retention import Cadence, Cost, KeepBest, Retention, young_daly_seconds
from jaxckpt._sync import PendingSave, Running
from jaxckpt._tiers import Place, Uploads

T = TypeVar("T")

_log = logging.getLogger("jaxckpt")


@dataclass(frozen=True, slots=True)
class StepStats:
    """How the save of a step went.

    Attributes:
        step: Its number.
        waited_seconds: How long `save` waited for an earlier save, because as many as allowed were in flight.
        blocked_seconds: How long `save` took in all, until the tree was captured.
        captured_seconds: From the beginning until the tree was captured, without the wait.
        written_seconds: From the same beginning until all data were durable.
        committed_seconds: The same until the checkpoint was committed.
        nbytes: Bytes of all arrays.
        written_nbytes: Bytes that this process wrote; what was linked is not among them.
    """

    step: int
    waited_seconds: float
    blocked_seconds: float
    captured_seconds: float
    written_seconds: float
    committed_seconds: float
    nbytes: int
    written_nbytes: int

    @property
    def bytes_per_second(self) -> float:
        """The rate of the whole save, linked bytes included."""
        return self.nbytes / max(self.committed_seconds, 1e-9)


class PendingStep:
    """The save of a step that goes on in the background; everything is captured already.

    Attributes:
        step: Its number.
        waited_seconds, blocked_seconds: See `StepStats`.
        collected: Whether somebody has seen how it ended.
    """

    def __init__(self, step: int, pending: PendingSave, began: float, waited_seconds: float) -> None:
        self.step = step
        self.waited_seconds = waited_seconds
        self.blocked_seconds = time.monotonic() - began
        self._began = began + waited_seconds
        self._pending = pending
        self._ended = 0.0
        self._settled = threading.Event()
        self.collected = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._settled.is_set()

    def result(self, timeout: float | None = None) -> StepStats:
        """Wait until the step is durable; raises what `PendingSave.result` does."""
        try:
            info = self._pending.result(timeout)
        finally:
            self.collected = self._pending.done()
        self._settled.wait()
        return self._stats(info)

    def __await__(self) -> Generator[Any, None, StepStats]:
        return asyncio.to_thread(self.result).__await__()

    def when_settled(self, committed: Callable[[StepStats], None]) -> None:
        """Call `committed` with the stats when the step is committed. It counts as done after that."""

        def settle(pending: PendingSave) -> None:
            self._ended = time.monotonic()
            try:
                if pending.failure() is None:
                    committed(self._stats(pending.info()))
            finally:
                self._settled.set()

        self._pending.add_done_callback(settle)

    def _stats(self, info: CheckpointInfo) -> StepStats:
        return StepStats(
            step=self.step,
            waited_seconds=self.waited_seconds,
            blocked_seconds=self.blocked_seconds,
            captured_seconds=info.captured_seconds,
            written_seconds=info.written_seconds,
            committed_seconds=self._ended - self._began,
            nbytes=info.nbytes,
            written_nbytes=info.indexes[jax.process_index()].written_nbytes,
        )


class Checkpointer:
    """Saves steps of a training run in the background, keeps those that are worth it, restores the newest.

    Each step is a checkpoint of its own, `root/<step>`, with all promises of `save`. Steps
    may be saved in any order. A failed save raises at the next call, at `wait` and at the
    end of the with block.

    Args:
        root: A directory or URL for this run alone.
        staging: A directory, on a local disk for example, to which steps are saved. Each is
            durable there, then copied to `root` in the background, and removed once a newer
            one is. `restore` takes the nearest sound copy. What a process that died has not
            copied, the next one does. All processes of a program must see the directory.
        max_staged: How many steps may wait in `staging` to be copied; with more a save waits,
            as its stats tell. A failed copy is raised at the next save and by `wait`, and
            tried again then.
        keep_last, keep_every, keep_best: Which steps to keep; see `Retention`. A step is
            kept if any rule keeps it; the newest always is; with no rule all are. Deleting
            happens in the background and never delays a save.
        every_steps, every_seconds, max_overhead: Which of the steps that are passed to
            `save` are saved; see `Cadence`.
        max_in_flight: How many saves may be in flight; one more waits, as its stats tell.
        full_every: Every so many saves all is written; in between, what has not changed is
            linked from the newest committed step. 1: always write all.
        save_on_signal: Signals, such as `signal.SIGTERM`, after which the next `save` is
            made whatever the cadence says, and `reached_preemption` is true.
        on_saved: Called with the `StepStats` of each committed step, from another thread.
        options: See `SaveOptions`.
        storage_options: As for `save`.

    Attributes:
        restored: What the last `restore` took: `restored.metadata["step"]`, `restored.local_data`.

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> import jax.numpy as jnp, jaxckpt
        >>> state = {"w": jnp.zeros(3), "step": 0}
        >>> with jaxckpt.Checkpointer("run", keep_last=2) as ckpt:
        ...     if ckpt.latest_step() is not None:
        ...         state = ckpt.restore(like=state)
        ...     for step in range(state["step"], 5):
        ...         state = {"w": state["w"] + 1, "step": step + 1}
        ...         pending = ckpt.save(step, state)
        >>> jaxckpt.Checkpointer("run").steps()
        [3, 4]
    """

    def __init__(
        self,
        root: PathLike,
        *,
        staging: PathLike | None = None,
        max_staged: int = 2,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        max_overhead: float | None = None,
        max_in_flight: int = 1,
        full_every: int = 10,
        save_on_signal: Iterable[int] = (),
        on_saved: Callable[[StepStats], None] | None = None,
        options: SaveOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        counts = (("max_in_flight", max_in_flight), ("full_every", full_every), ("max_staged", max_staged))
        for name, value in counts:
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")
        self._retention = Retention(keep_last, keep_every, keep_best)
        self._cadence = Cadence(every_steps, every_seconds, max_overhead)
        self._max_in_flight = max_in_flight
        self._full_every = full_every
        self._on_saved = on_saved
        self._options = options
        self._cost = Cost()
        self._begun = time.monotonic()
        self._since_full = 0
        self._in_flight: list[PendingStep] = []
        self._deleting: Running[None] | None = None
        self._lock = threading.Condition()
        self._damaged: set[int] = set()
        self._in_use: Counter[int] = Counter()
        self._uses = 0
        self._being_deleted: int | None = None
        self._metrics: dict[int, dict[str, float]] = {}
        self._signalled = False
        self._closed = False
        self.restored: CheckpointInfo | None = None
        # Of several processes JAX notes the signal, by a handler of its own; see reached_preemption.
        self._root = Place(root, storage_options)
        self._places = [self._root] if staging is None else [Place(staging), self._root]
        uploads = staging is not None and jax.process_index() == 0
        self._uploads = Uploads(*self._places, most=max_staged, using=self._using) if uploads else None
        signals = () if jax.distributed.is_initialized() else save_on_signal
        self._handlers = {number: signal.signal(number, self._note_signal) for number in signals}

    # --- saving

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        local_data: Any = None,
        force: bool = False,
        overwrite: bool = False,
    ) -> PendingStep | None:
        """Save `tree` as `step`, if it is due; returns as soon as it is captured.

        The caller may donate, delete or overwrite everything in `tree` from then on.

        Args:
            step: Its number.
            tree: As for `save`.
            metrics: Numbers that `keep_best` may look at.
            metadata, local_data: As for `save`: what to keep in the same commit, for example
                the state of the data loader.
            force: Save it whatever the cadence says.
            overwrite: Replace the step if it was saved before. One that `restore` has
                skipped because it is damaged is always replaced.

        Returns:
            A handle, with `result()`; None where the step is not due.

        Raises:
            CheckpointExistsError: The step was saved before.
            CheckpointError: An earlier save failed.
        """
        self._check_open()
        step = _checked_step(step)
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        began = time.monotonic()
        self._cost.visit(began, in_flight=any(not pending.done() for pending in self._in_flight))
        if not (force or self._signalled or self._is_due(step, began)):
            return None
        self._collect(all_but=self._max_in_flight - 1)
        if self._uploads:
            self._uploads.wait_for_room()
        waited_seconds = time.monotonic() - began
        place, overwrite = self._places[0], overwrite or step in self._damaged
        if place is not self._root and not overwrite and self._root.has(step):
            raise CheckpointExistsError(errno.EEXIST, f"step {step} was saved before", str(self._root))
        with contextlib.ExitStack() as claim:
            claim.enter_context(self._using(step))  # an old step of this number is not deleted meanwhile
            pending = _api.start_save(
                place.path(step),
                tree,
                overwrite=overwrite,
                base=self._base(),
                metadata={**(metadata or {}), "step": step, "metrics": numbers},
                local_data=local_data,
                options=self._options,
                storage_options=place.storage_options,
            )
            release = claim.pop_all().close
        pending.add_done_callback(lambda _: release())
        self._damaged.discard(step)
        self._begun = began
        handle = PendingStep(step, pending, began, waited_seconds)
        self._cost.saved(handle.blocked_seconds, time.monotonic())
        self._in_flight.append(handle)
        handle.when_settled(partial(self._committed, numbers))
        return handle

    def reached_preemption(self, step: int) -> bool:
        """Whether the program is about to be stopped: save, and leave the loop.

        True after one of `save_on_signal`. In a program of several processes JAX decides,
        for all of them at the same step, once any has got SIGTERM.

        Source: `jax.experimental.multihost_utils.reached_preemption_sync_point`.
        """
        if jax.process_count() > 1:
            self._signalled = self._signalled or multihost_utils.reached_preemption_sync_point(step)
        return self._signalled

    def interval_seconds(self, mean_seconds_between_failures: float) -> float:
        """The best time between saves for the measured cost of one; see `young_daly_seconds`."""
        return young_daly_seconds(self._cost.seconds, mean_seconds_between_failures)

    # --- restoring

    def restore(self, step: int | None = None, like: Any = None, *, options: RestoreOptions | None = None) -> Any:
        """Restore a step; with no step the newest that is sound.

        Args:
            step: Its number. None: the newest; where that is damaged the one before it, and
                so on, each with a warning that says what is wrong.
            like, options: As for `restore`.

        Returns:
            The tree. `restored` tells which step it is.

        Raises:
            CheckpointNotFoundError: There is no such step, or none at all.
            CorruptCheckpointError: It is damaged, or all are.
            LeafMismatchError: As `restore`.
        """
        if step is not None:
            return self._restore(_checked_step(step), like, options)
        problems: dict[int, str] = {}
        gone: set[int] = set()
        # Listed anew each time: retention may have deleted the newest in favour of a newer one.
        while steps := [step for step in self.steps() if step not in problems and step not in gone]:
            try:
                return self._restore(steps[-1], like, options)
            except CheckpointNotFoundError:
                gone.add(steps[-1])
            except CorruptCheckpointError as error:
                problems[steps[-1]] = f"step {steps[-1]}: {error}"
                self._damaged.add(steps[-1])
                warnings.warn(f"skipped a damaged checkpoint: {problems[steps[-1]]}", stacklevel=2)
        if problems:
            raise CorruptCheckpointError(f"{self._root}: no step is sound; " + "; ".join(problems.values()))
        raise CheckpointNotFoundError(errno.ENOENT, "no step was saved", str(self._root))

    def _restore(self, step: int, like: Any, options: RestoreOptions | None) -> Any:
        with self._using(step):
            return self._nearest(step, partial(self._restore_from, step, like, options))

    def _restore_from(self, step: int, like: Any, options: RestoreOptions | None, place: Place) -> Any:
        tree = _api.restore(place.path(step), like, options=options, storage_options=place.storage_options)
        self.restored = _api.describe(place.path(step), storage_options=place.storage_options)
        return tree

    def _nearest(self, step: int, look: Callable[[Place], T]) -> T:
        """What `look` finds at the nearest place that has a sound copy of a step."""
        for place in self._places[:-1]:
            try:
                return look(place)
            except CheckpointNotFoundError:
                continue
            except CorruptCheckpointError as error:
                warnings.warn(f"skipped a damaged copy of step {step}: {error}", stacklevel=4)
        return look(self._places[-1])

    # --- looking

    def steps(self) -> list[int]:
        """The committed steps, in order."""
        return sorted({step for place in self._places for step in place.steps()})

    def latest_step(self) -> int | None:
        """The committed step with the highest number."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The committed step that `keep_best` finds best."""
        if self._retention.keep_best is None:
            raise ValueError(
                "keep_best was not given; Checkpointer(root, keep_best=KeepBest('loss')) tells what is best"
            )
        best = self._retention.keep_best.best(self._metrics_of(self.steps()))
        return best[0] if best else None

    def info(self, step: int) -> CheckpointInfo:
        """What is known of a step, from its manifest: sizes, metrics, metadata."""
        step = _checked_step(step)
        return self._nearest(step, lambda place: _api.describe(place.path(step), storage_options=place.storage_options))

    # --- ending

    def wait(self) -> None:
        """Wait until all saves are durable, at `root` too, and all that they made superfluous is deleted.

        Raises:
            CheckpointError: A save or a copy failed, or a step could not be deleted.
        """
        self._collect(all_but=0)
        if self._uploads:
            self._uploads.wait()
        with self._lock:
            deleting = self._deleting
        if deleting is not None:
            try:
                deleting.result()
            finally:
                with self._lock:
                    if self._deleting is deleting:  # so that a failure is raised once
                        self._deleting = None

    def close(self) -> None:
        """`wait`, and give the signals back. Nothing can be saved any more."""
        if self._closed:
            return
        self._closed = True
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(CheckpointError):  # the error that ended the block is the news
            self.close()

    # --- within

    def _collect(self, *, all_but: int) -> None:
        """Wait until at most `all_but` saves are in flight; raise the failure of one that has ended."""
        ended = [pending for pending in self._in_flight if pending.done()]
        running = [pending for pending in self._in_flight if not pending.done()]
        for pending in [*ended, *running[: max(0, len(running) - all_but)]]:
            self._in_flight.remove(pending)
            if not pending.collected:
                pending.result()

    def _is_due(self, step: int, now: float) -> bool:
        due = self._cadence.is_due(step, now - self._begun, self._cost.seconds)
        return _api.agreed(due) if self._cadence.looks_at_time else due

    def _base(self) -> str | None:
        """The step to link from, or None where all is to be written."""
        self._since_full = self._since_full % self._full_every + 1
        if self._since_full == 1:
            return None
        place = self._places[0]
        if not place.is_local:
            return None  # nothing can be linked there
        sound = [step for step in place.steps() if step not in self._damaged]
        return place.path(sound[-1]) if sound else None

    @contextlib.contextmanager
    def _using(self, step: int) -> Generator[None]:
        """Keep a step from being deleted for the length of the block; a deletion that has begun ends first."""
        with self._lock:
            self._lock.wait_for(lambda: self._being_deleted != step)
            self._in_use[step] += 1
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[step] -= 1
                self._uses += 1

    def _committed(self, metrics: dict[str, float], stats: StepStats) -> None:
        self._metrics[stats.step] = metrics
        _log.info(
            "saved step %d: %d bytes (%d written) in %.3f s, the loop blocked for %.3f s",
            stats.step,
            stats.nbytes,
            stats.written_nbytes,
            stats.committed_seconds,
            stats.blocked_seconds,
        )
        if self._uploads:
            self._uploads.add(stats.step)
        if self._on_saved:
            self._on_saved(stats)
        if jax.process_index() == 0 and not self._retention.keeps_all:
            with self._lock:
                self._deleting = Running(self._delete_after(self._deleting), None, "deletion of old steps")

    def _delete_after(self, earlier: Running[None] | None) -> Callable[[], Any]:
        async def delete() -> None:
            if earlier is not None:
                with contextlib.suppress(CheckpointError):  # this one tries again what that has left
                    await asyncio.wrap_future(earlier.future)
            await asyncio.to_thread(self._delete_superfluous)

        return delete

    def _delete_superfluous(self) -> None:
        deleted: set[int] = set()
        # Decided anew each time: a step may have been overwritten meanwhile, with better metrics.
        while (step := self._claim_superfluous(deleted)) is not None:
            deleted.add(step)
            try:
                for place in self._places:  # the staged copy first, or it would be uploaded again
                    place.delete(step)
            finally:
                with self._lock:
                    self._being_deleted = None
                    self._lock.notify_all()

    def _claim_superfluous(self, deleted: set[int]) -> int | None:
        """A step to delete, other than those given; whoever wants to use it waits from now on."""
        while True:
            uses = self._uses
            steps = self.steps()
            metrics = self._metrics_of(steps) if self._retention.keep_best else {step: {} for step in steps}
            kept = self._retention.kept(steps, metrics)
            kept |= set(steps) - metrics.keys()  # one whose metrics cannot be read may be the best
            superfluous = [step for step in steps if step not in kept and step not in deleted]
            with self._lock:
                if uses == self._uses:
                    self._being_deleted = next((step for step in superfluous if not self._in_use[step]), None)
                    return self._being_deleted

    def _metrics_of(self, steps: Iterable[int]) -> dict[int, dict[str, float]]:
        for step in steps:
            if step not in self._metrics:
                with contextlib.suppress(CheckpointError):
                    # Not over what a commit meanwhile has noted.
                    self._metrics.setdefault(step, self.info(step).metadata.get("metrics", {}))
        return {step: self._metrics[step] for step in steps if step in self._metrics}

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        handler = self._handlers.get(number)
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the Checkpointer of {self._root} is closed; make a new one")


class AsyncCheckpointer:
    """`Checkpointer` for asyncio programs: what waits is awaitable, and the loop is never blocked.

    Arguments, guarantees and errors are those of `Checkpointer`; `blocking` is the one within.
    """

    def __init__(self, root: PathLike, **arguments: Any) -> None:
        self.blocking = Checkpointer(root, **arguments)

    async def save(self, step: int, tree: Any, **arguments: Any) -> PendingStep | None:
        return await asyncio.to_thread(self.blocking.save, step, tree, **arguments)

    async def restore(self, step: int | None = None, like: Any = None, **arguments: Any) -> Any:
        return await asyncio.to_thread(self.blocking.restore, step, like, **arguments)

    async def steps(self) -> list[int]:
        return await asyncio.to_thread(self.blocking.steps)

    async def latest_step(self) -> int | None:
        return await asyncio.to_thread(self.blocking.latest_step)

    async def best_step(self) -> int | None:
        return await asyncio.to_thread(self.blocking.best_step)

    async def wait(self) -> None:
        await asyncio.to_thread(self.blocking.wait)

    async def close(self) -> None:
        await asyncio.to_thread(self.blocking.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.blocking.__exit__, kind, error, trace)


def _checked_step(step: Any) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step is {step!r}; expected a whole number of at least 0")
    return number
