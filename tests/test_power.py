"""Disks that lose power, fill up, hang or refuse: what was acknowledged stays, and the rest says what is wrong."""

import asyncio
import contextlib
import errno
import itertools
import os
import random
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import power_child
import pytest
from disks import Disk, disk, immutable, needs_disks, read_only, tmpfs
from forked import Pipe, start
from jax.sharding import SingleDeviceSharding
from power_child import OPTIONS, Step, array_of, same, tree_of

import jaxckpt
from jaxckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    SaveOptions,
    SaveTimeoutError,
    StorageError,
    _commit,
    _tasks,
)
from jaxckpt._local import LocalLocation

pytestmark = needs_disks

TORN = -1
"""In place of the number of what is at a path: something that was never saved."""

# ---------------------------------------------------------------- power cuts


@dataclass
class Ledger:
    """What a process reported before its disk lost power."""

    last: dict[str, Step] = field(default_factory=dict)
    begun: Step | None = None
    acknowledged: int = 0

    def note(self, event: tuple[str, Step]) -> None:
        what, step = event
        if what == "begun":
            self.begun = step
        else:
            self.begun = None
            self.last[step.path] = step
            self.acknowledged += 1

    def drain(self, report: Any) -> None:
        """Note what the process still said; it may have died in the middle of a word."""
        try:
            while report.poll():
                self.note(report.recv())
        except (EOFError, OSError):
            return

    def allowed(self) -> dict[Step, set[int | None]]:
        """The numbers that may be found at the path of each step: of the last acknowledged, or the one in flight."""
        found = {step: {step.number} for step in self.last.values()}
        if self.begun is not None:
            before = self.last.get(self.begun.path)
            if before is not None:
                del found[before]
            found[self.begun] = {self.begun.number, before.number if before else None}
        return found


@dataclass
class Figures:
    """What happened in all cuts of one test."""

    cuts: int = 0
    in_flight: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def add(self, ledger: Ledger) -> None:
        self.cuts += 1
        if ledger.begun is not None:
            replaces = ledger.begun.kind == "save" and ledger.begun.path in ledger.last
            self.in_flight["overwrite" if replaces else ledger.begun.kind] += 1
        self.acknowledged += ledger.acknowledged

    def report(self, what: str) -> None:
        seconds = (time.monotonic() - self.began) / self.cuts
        print(
            f"{what}: {self.cuts} power cuts, {self.acknowledged} steps acknowledged, {len(self.lost)} lost, "
            f"{len(self.torn)} torn, {seconds:.2f} s a cut; in flight: {dict(self.in_flight) or 'nothing'}"
        )


@contextlib.contextmanager
def saving(root: Path, first: int, count: int | None, mutant: str = "") -> Generator[Any]:
    """A process that saves below `root`, killed at the end of the block; its reports can be received."""
    report, theirs = Pipe()
    process = start(power_child.keep_saving, theirs, root, first, count, mutant)
    theirs.close()
    try:
        assert report.poll(60), "the process does not start"
        yield report
    finally:
        process.kill()
        process.join()


def cut_at_random(device: Disk, root: Path, chance: random.Random, mutant: str = "") -> Ledger:
    """Cut the power in the middle of a series of saves, overwrites and deletions."""
    ledger = Ledger()
    with saving(root, chance.randrange(10**6), None, mutant) as report:
        for _ in range(chance.randrange(1, 8 if mutant else 32)):
            ledger.note(report.recv())
        time.sleep(chance.uniform(0, 0.5 if mutant else 0.05))
        device.cut_power()
    ledger.drain(report)
    return ledger


def cut_after(device: Disk, root: Path, first: int, count: int, *, wait_seconds: float = 0, mutant: str = "") -> Ledger:
    """Cut the power when `count` steps have returned and nothing else goes on."""
    ledger = Ledger()
    with saving(root, first, count, mutant) as report:
        while ledger.acknowledged < count:
            ledger.note(report.recv())
        time.sleep(wait_seconds)
        device.cut_power()
    return ledger


def judge(device: Disk, root: Path, ledger: Ledger, figures: Figures) -> None:
    """Look at a disk after a power cut: what is lost, what is torn."""
    device.restart()
    figures.add(ledger)
    for step, allowed in ledger.allowed().items():
        found = found_at(root, step)
        if found not in allowed:
            problem = f"{step.path}: found {found}, expected {allowed}"
            (figures.torn if found == TORN else figures.lost).append(problem)


def found_at(root: Path, step: Step) -> int | None:
    """The number of what is stored at the path of `step`, None where nothing is."""
    path = root / step.path
    try:
        if step.kind == "serialize":
            assert step.number is not None
            return step.number if same(read_array(path), np.asarray(array_of(step.number))) else TORN
        found = jaxckpt.restore(path)
        whole = jaxckpt.verify(path).ok and same(found, tree_of(found["number"]))
    except CheckpointNotFoundError:
        return None
    except CheckpointError:
        return TORN
    return found["number"] if whole else TORN


def read_array(path: Path) -> np.ndarray[Any, Any]:
    sharding = SingleDeviceSharding(jax.devices()[0])
    return np.asarray(asyncio.run(jaxckpt.async_deserialize([path], [sharding]))[0])


def check_recovery(root: Path, ledger: Ledger) -> None:
    """After a power cut `gc` leaves nothing behind, and the step that was in flight can be taken again."""
    if not root.exists():
        return
    jaxckpt.gc(root, grace_seconds=0)
    leave_no_rest([root / "latest", *(root / "steps").glob("*")])
    if ledger.begun is not None and ledger.begun.number is not None:
        again = ledger.begun._replace(number=ledger.begun.number + 1)
        power_child.take(again, root)
        assert found_at(root, again) == again.number


def leave_no_rest(checkpoints: list[Path]) -> None:
    """Assert that each checkpoint is its manifest and the data which that names, or an empty directory."""
    for path in checkpoints:
        names = set(os.listdir(path)) if path.exists() else set()
        assert names in (set(), {"manifest.json", *(f"d-{jaxckpt.describe(path).attempt}" for _ in names)})


def start_over(device: Disk, root: Path) -> None:
    """Make the disk empty, durably, so that it does not fill up and the next cut tests only its own steps."""
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["sync", "--file-system", device.path], check=True)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_power_cut_at_any_instant_loses_nothing_acknowledged_and_tears_nothing(
    tmp_path: Path, kind: str, long: bool
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance, figures, cuts = random.Random(seed), Figures(), 100 if long else 18
    with disk(kind, tmp_path) as device:
        for number in range(cuts):
            root = device.path / f"run-{number}"
            ledger = cut_at_random(device, root, chance)
            judge(device, root, ledger, figures)
            check_recovery(root, ledger)
            start_over(device, root)
    figures.report(f"{kind}, at random instants")
    assert (figures.lost, figures.torn) == ([], [])
    assert figures.cuts >= cuts
    assert figures.in_flight.total() >= cuts // 2
    assert figures.acknowledged >= cuts


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_power_cut_right_after_the_return_loses_nothing_and_tears_nothing(
    tmp_path: Path, kind: str, long: bool
) -> None:
    figures = Figures()
    with disk(kind, tmp_path) as device:
        # Each kind of step is the last one before a cut: a save, an overwrite, an array, a deletion.
        for count in range(1, 33 if long else 10):
            root = device.path / f"run-{count}"
            ledger = cut_after(device, root, 100 * count, count)
            judge(device, root, ledger, figures)
            check_recovery(root, ledger)
            start_over(device, root)
    figures.report(f"{kind}, right after the return")
    assert (figures.lost, figures.torn) == ([], [])
    assert figures.acknowledged == sum(range(1, figures.cuts + 1))


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_power_cut_eight_seconds_after_the_return_loses_nothing_and_tears_nothing(
    tmp_path: Path, kind: str, long: bool
) -> None:
    figures = Figures()
    with disk(kind, tmp_path) as device:
        for number in range(10 if long else 1):
            root = device.path / f"run-{number}"
            ledger = cut_after(device, root, 100 * number, 9 + number, wait_seconds=8)
            judge(device, root, ledger, figures)
            check_recovery(root, ledger)
            start_over(device, root)
    figures.report(f"{kind}, eight seconds after the return")
    assert (figures.lost, figures.torn) == ([], [])
    assert figures.acknowledged >= 9 * figures.cuts


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("mutant", power_child.MUTANTS)
def test_a_save_that_omits_a_sync_is_found_out_by_a_power_cut(tmp_path: Path, kind: str, mutant: str) -> None:
    figures = Figures()
    with disk(kind, tmp_path) as device:
        for count in (1, 3, 9):  # the last step is a save, an overwrite, a deletion
            root = device.path / f"run-{count}"
            judge(device, root, cut_after(device, root, 100 * count, count, mutant=mutant), figures)
            start_over(device, root)
    figures.report(f"{kind}, {mutant}")
    assert figures.torn if mutant == "data are not synced" else figures.lost


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_save_that_commits_before_its_data_are_durable_is_found_out_by_power_cuts_at_random_instants(
    tmp_path: Path, kind: str
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance, figures = random.Random(seed), Figures()
    with disk(kind, tmp_path) as device:
        while not figures.torn and figures.cuts < 12:
            root = device.path / f"run-{figures.cuts}"
            judge(device, root, cut_at_random(device, root, chance, power_child.LATE), figures)
            start_over(device, root)
    figures.report(f"{kind}, {power_child.LATE}")
    assert figures.torn


# ---------------------------------------------------------------- full disks

SMALL_ROW = 16 << 10
STEP_BYTES = 4 << 10
SMALL_OPTIONS = SaveOptions(pack_below_bytes=8 << 10)


def fill(room: Path, limit: str, level: int) -> None:
    """Leave room for `level` steps of 4 KiB, or for `level` files, on the file system of `room`."""
    room.mkdir()
    if limit == "inodes":
        for number in range(os.statvfs(room).f_ffree - level):
            (room / str(number)).touch()
        return
    size = 0
    with (room / "filler").open("wb") as filler:
        for chunk in (1 << 20, STEP_BYTES):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(filler.fileno(), size, chunk)
                    size += chunk
        filler.truncate(size - level * STEP_BYTES)
        os.fsync(filler.fileno())  # only then a journal gives back the blocks


def try_to_save(path: Path, number: int) -> StorageError | None:
    try:
        jaxckpt.save(path, tree_of(number, SMALL_ROW), overwrite=True, options=SMALL_OPTIONS)
    except StorageError as error:
        return error
    return None


def is_saved(path: Path, number: int) -> bool:
    return same(jaxckpt.restore(path), tree_of(number, SMALL_ROW)) and jaxckpt.verify(path).ok


def survive_full_disks(mount: Path, limit: str, stride: int, *, overwrite: bool) -> int:
    """Save on a disk that is fuller and fuller less full, in steps until the save fits. Returns how many failed."""
    path, room, empty = mount / "runs" / "a", mount / "room", sorted(os.listdir(mount))
    for failed in itertools.count():
        number = 3 * failed
        if overwrite:
            assert try_to_save(path, number) is None
        fill(room, limit, failed * stride)
        error = try_to_save(path, number + 1)
        shutil.rmtree(room)
        if error is None:
            assert is_saved(path, number + 1)
            return failed
        assert error.errno == errno.ENOSPC
        assert names_part_of(path, str(error))
        if overwrite:
            assert is_saved(path, number)
            leave_no_rest([path])
        else:
            assert sorted(os.listdir(mount)) == empty
        assert try_to_save(path, number + 2) is None
        assert is_saved(path, number + 2)
        if not overwrite:
            shutil.rmtree(mount / "runs")
    raise AssertionError


@pytest.mark.parametrize("overwrite", [False, True], ids=["a new checkpoint", "an overwrite"])
@pytest.mark.parametrize("limit", ["bytes", "inodes"])
def test_a_disk_that_is_full_at_any_level_is_an_error_and_leaves_the_old_checkpoint(
    tmp_path: Path, limit: str, overwrite: bool, long: bool
) -> None:
    with tmpfs(tmp_path, "size=2m,nr_inodes=100") as mount:
        failed = survive_full_disks(mount, limit, 1 if long or limit == "inodes" else 2, overwrite=overwrite)
    print(f"tmpfs, {limit}: {failed} saves on a full disk failed")
    assert failed >= 15


@pytest.mark.parametrize("overwrite", [False, True], ids=["a new checkpoint", "an overwrite"])
def test_a_disk_with_a_journal_that_is_full_is_an_error_and_leaves_the_old_checkpoint(
    tmp_path: Path, overwrite: bool, long: bool
) -> None:
    with disk("ext4", tmp_path) as device:
        failed = survive_full_disks(device.path, "bytes", 1 if long else 6, overwrite=overwrite)
    print(f"ext4, bytes: {failed} saves on a full disk failed")
    assert failed >= 6


def test_a_failed_save_that_does_not_clean_up_is_found_out_by_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_commit.Attempt, "abandon", lambda _attempt: None)
    with tmpfs(tmp_path, "size=2m,nr_inodes=100") as mount, pytest.raises(AssertionError):
        survive_full_disks(mount, "bytes", 8, overwrite=True)


def test_an_array_on_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    failed = 0
    with tmpfs(tmp_path, "size=2m") as mount:
        while error := try_to_serialize(mount, failed):
            assert error.errno == errno.ENOSPC
            assert names_part_of(mount / "a", str(error))
            assert os.listdir(mount) == []
            failed += 1
        assert same(read_array(mount / "a"), np.asarray(array_of(failed, SMALL_ROW)))
    print(f"tmpfs, bytes: {failed} arrays on a full disk failed")
    assert failed >= 8


def try_to_serialize(mount: Path, number: int) -> StorageError | None:
    """Write an array with room for 16 KiB times `number`."""
    fill(mount / "room", "bytes", 4 * number)
    try:
        asyncio.run(jaxckpt.async_serialize([array_of(number, SMALL_ROW)], [mount / "a"]))
    except StorageError as error:
        return error
    finally:
        shutil.rmtree(mount / "room")
    return None


# ---------------------------------------------------------------- hung disks

LIMIT_SECONDS = 2
LIMITED = SaveOptions(pack_below_bytes=64 << 10, timeout_seconds=LIMIT_SECONDS)


@pytest.fixture
def linger_seconds(long: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """How long a save waits for calls that hang, twice at most, after its time is up: less, but in the long form."""
    if not long:
        monkeypatch.setattr(_tasks, "_LINGER_SECONDS", 1)
    return _tasks._LINGER_SECONDS


@pytest.mark.parametrize("instant", ["before it starts", "while data are written", "when all data are written"])
def test_a_save_on_a_hung_disk_times_out_and_leaves_the_old_checkpoint(
    tmp_path: Path, instant: str, linger_seconds: float
) -> None:
    with disk("ext4", tmp_path) as device:
        path = device.path / "a"
        jaxckpt.save(path, tree_of(0), options=OPTIONS)
        if instant == "before it starts":
            device.freeze()

        freeze = once(device.freeze)

        def progress(done: int, total: int) -> None:
            if done == total or instant == "while data are written":
                freeze()

        began = time.monotonic()
        with pytest.raises(SaveTimeoutError, match="the save did not end within 2 seconds; raise timeout_seconds, or"):
            jaxckpt.save(path, tree_of(1), overwrite=True, options=LIMITED, on_progress=progress)
        seconds = time.monotonic() - began
        device.thaw()
        print(f"frozen {instant}: gave up after {seconds:.1f} s")
        assert seconds < LIMIT_SECONDS + 2 * linger_seconds + 2
        assert same(jaxckpt.restore(path), tree_of(0))
        assert jaxckpt.verify(path).ok
        jaxckpt.save(path, tree_of(2), overwrite=True, options=LIMITED)
        assert same(jaxckpt.restore(path), tree_of(2))
        wait_until(no_worker_is_left)
        jaxckpt.gc(path, grace_seconds=0)
        leave_no_rest([path])


def test_a_save_that_hangs_in_its_commit_times_out_and_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, linger_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk("ext4", tmp_path) as device:
        path, put = device.path / "a", LocalLocation.put
        jaxckpt.save(path, tree_of(0), options=OPTIONS)

        def freeze_and_put(*args: Any, **kwargs: Any) -> None:
            device.freeze()
            put(*args, **kwargs)

        monkeypatch.setattr(LocalLocation, "put", freeze_and_put)
        with pytest.raises(SaveTimeoutError):
            jaxckpt.save(path, tree_of(1), overwrite=True, options=LIMITED)
        monkeypatch.undo()
        device.thaw()
        wait_until(no_worker_is_left)
        found = jaxckpt.restore(path)
        print(f"frozen in the commit: found {'the new' if found['number'] else 'the old'} checkpoint")
        assert same(found, tree_of(found["number"]))
        assert jaxckpt.verify(path).ok
        jaxckpt.gc(path, grace_seconds=0)
        leave_no_rest([path])


def test_a_first_save_that_hung_before_it_began_leaves_nothing_once_the_disk_works_again(
    tmp_path: Path, linger_seconds: float
) -> None:
    with disk("ext4", tmp_path) as device:
        before = os.listdir(device.path)
        with device.frozen(), pytest.raises(SaveTimeoutError):
            jaxckpt.save(device.path / "runs" / "a", tree_of(1), options=LIMITED)
        wait_until(no_worker_is_left)
        assert os.listdir(device.path) == before


def test_waiting_for_a_save_on_a_hung_disk_ends_in_time_and_the_save_goes_on(tmp_path: Path) -> None:
    with disk("ext4", tmp_path) as device:
        freeze = once(device.freeze)
        pending = jaxckpt.start_save(
            device.path / "a", tree_of(1), options=OPTIONS, on_progress=lambda _done, _total: freeze()
        )
        with pytest.raises(TimeoutError):
            pending.result(timeout=1)
        device.thaw()
        assert pending.result(timeout=60).attempt
        assert same(jaxckpt.restore(device.path / "a"), tree_of(1))


def test_a_script_whose_save_hangs_exits_with_an_error_in_bounded_time(tmp_path: Path) -> None:
    with disk("ext4", tmp_path) as device:
        path = device.path / "a"
        jaxckpt.save(path, tree_of(0), options=OPTIONS)
        with device.frozen():
            began = time.monotonic()
            process = start(power_child.save_on_a_frozen_disk, path, 1)
            # The kernel keeps a thread in a frozen disk, and so the process, until it works again; the rest is gone.
            wait_until(lambda: exit_code(process) is not None, seconds=30)
            seconds, code = time.monotonic() - began, exit_code(process)
        process.join(10)
        print(f"exit code {code} after {seconds:.1f} s")
        assert code == process.exitcode == 1
        assert same(jaxckpt.restore(path), tree_of(0))


def no_worker_is_left() -> bool:
    """Whether the calls that hung have ended."""
    return all(thread.name != "jaxckpt-worker" for thread in threading.enumerate())


def once(action: Callable[[], None]) -> Callable[[], None]:
    """`action` that happens at the first call only."""
    left = [action]
    return lambda: left.pop()() if left else None


def wait_until(reached: Callable[[], bool], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)


def exit_code(process: BaseProcess) -> int | None:
    """The exit code of a process, also of one that has ended but for a thread in the kernel; None while it runs."""
    if process.exitcode is None:
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None
    return process.exitcode


# ---------------------------------------------------------------- storage that refuses


def refusal(path: Path, number: int = 1) -> StorageError:
    with pytest.raises(StorageError) as caught:
        jaxckpt.save(path, tree_of(number), overwrite=True, options=OPTIONS)
    assert names_part_of(path, str(caught.value))
    return caught.value


def names_part_of(path: Path, message: str) -> bool:
    """Whether an error names the checkpoint, something in it, or the new directory that it was to be in."""
    return str(path) in message or f"'{path.parent}'" in message


def everything_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_read_only_file_system_refuses_and_nothing_changes(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", tree_of(0), options=OPTIONS)
    before = everything_in(tmp_path)
    with read_only(tmp_path):
        assert refusal(tmp_path / "a").errno == errno.EROFS
        assert refusal(tmp_path / "new" / "b").errno == errno.EROFS
        with pytest.raises(StorageError) as caught:
            asyncio.run(jaxckpt.async_serialize([array_of(1)], [tmp_path / "c"]))
        assert caught.value.errno == errno.EROFS
        with pytest.raises(StorageError) as caught:
            jaxckpt.delete(tmp_path / "a")
        assert caught.value.errno == errno.EROFS
        assert same(jaxckpt.restore(tmp_path / "a"), tree_of(0))
        assert jaxckpt.verify(tmp_path / "a").ok
        assert not jaxckpt.gc(tmp_path, grace_seconds=0).removed
    assert everything_in(tmp_path) == before
    jaxckpt.save(tmp_path / "a", tree_of(2), overwrite=True, options=OPTIONS)


def test_an_immutable_directory_refuses_and_nothing_changes(tmp_path: Path) -> None:
    with disk("ext4", tmp_path) as device:
        path, empty = device.path / "a", device.path / "empty"
        jaxckpt.save(path, tree_of(0), options=OPTIONS)
        empty.mkdir()
        before = everything_in(device.path)
        with immutable(path, empty):
            assert refusal(path).errno == errno.EPERM
            assert refusal(empty).errno == errno.EPERM
            assert refusal(empty / "new" / "b").errno == errno.EPERM
            assert same(jaxckpt.restore(path), tree_of(0))
        with immutable(path / "manifest.json"):
            assert refusal(path).errno == errno.EPERM
            assert same(jaxckpt.restore(path), tree_of(0))
            leave_no_rest([path])
        assert everything_in(device.path).keys() == before.keys()
        jaxckpt.save(path, tree_of(2), overwrite=True, options=OPTIONS)
        assert same(jaxckpt.restore(path), tree_of(2))


@pytest.fixture
def shared_folder() -> Generator[Path]:
    """A folder that every user can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def as_nobody(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns in a process of an unprivileged user with the umask 077."""
    report, theirs = Pipe()
    process = start(power_child.run_as_nobody, theirs, function, *args)
    theirs.close()
    try:
        assert report.poll(60), "the process does not answer"
        return report.recv()
    finally:
        process.kill()
        process.join()


def test_a_user_without_permission_is_refused_and_nothing_changes(shared_folder: Path) -> None:
    jaxckpt.save(shared_folder / "a", tree_of(0), options=OPTIONS)
    before = everything_in(shared_folder)
    for name in ("a", "new", "new/b"):
        number, message = as_nobody(power_child.refused, shared_folder / name)
        assert number == errno.EACCES
        assert names_part_of(shared_folder / name, message)
    assert everything_in(shared_folder) == before
    assert as_nobody(power_child.is_readable, shared_folder / "a", 0)


def test_a_checkpoint_that_a_user_may_not_read_says_so(shared_folder: Path) -> None:
    jaxckpt.save(shared_folder / "a", tree_of(0), options=OPTIONS)
    (shared_folder / "a" / "manifest.json").chmod(0o600)
    number, message = as_nobody(power_child.unreadable, shared_folder / "a")
    assert number == errno.EACCES
    assert str(shared_folder / "a" / "manifest.json") in message


@pytest.mark.parametrize("mode", [0o755, 0o711], ids=oct)
def test_a_user_saves_with_the_modes_of_the_umask_also_where_the_parent_is_not_readable(
    shared_folder: Path, mode: int
) -> None:
    own = shared_folder / "own"
    own.mkdir()
    os.chown(own, power_child.NOBODY, power_child.NOBODY)
    shared_folder.chmod(mode)
    assert as_nobody(power_child.saved, own, 1)
    assert same(jaxckpt.restore(own), tree_of(1))
    found = {stat.filemode(path.lstat().st_mode) for path in own.rglob("*")}
    assert found == {"drwx------", "-rw-------"}
