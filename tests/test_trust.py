"""`verify`, `gc` and `delete`, called and as commands: what they report, and what they never touch."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import syscalls_child
import trust_child
from click.testing import CliRunner, Result
from writers_child import generation_at

import jaxckpt
from jaxckpt import CheckpointNotFoundError
from jaxckpt._cli import cli
from jaxckpt._local import LocalLocation

TEN_YEARS = 10 * 365 * 24 * 3600
LEFT = "d-" + "0" * 32
TEMPORARY = ".manifest.json." + "0" * 32


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    syscalls_child.save(str(tmp_path / "a"), 1, False)
    return tmp_path / "a"


def data_of(checkpoint: Path) -> Path:
    return checkpoint / f"d-{jaxckpt.describe(checkpoint).attempt}"


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def leave(folder: Path, age_seconds: float = TEN_YEARS) -> tuple[Path, Path]:
    """What a killed save leaves: data and a temporary file, last changed `age_seconds` ago."""
    data, temporary = folder / LEFT, folder / TEMPORARY
    (data / "arrays" / "large").mkdir(parents=True)
    (data / "arrays" / "large" / "c.0").write_bytes(b"x" * 100)
    (data / "index-0.json").write_text("{")
    temporary.write_text("{" * 11)
    for path in [*data.rglob("*"), data, temporary]:
        os.utime(path, (time.time() - age_seconds, time.time() - age_seconds))
    return data, temporary


def command(*args: Any) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def test_all_faults_are_reported_by_leaf_not_only_the_first(saved: Path) -> None:
    data = data_of(saved)
    flip(data / "arrays" / "large" / "c.0.0", 5)
    flip(data / "arrays" / "large" / "zarr.json", 5)
    (data / "arrays" / "large" / "c.1.0").unlink()
    (data / "surplus").write_text("")
    report = jaxckpt.verify(saved)
    assert not report.ok
    by_leaf = report.by_leaf()
    assert {name: len(faults) for name, faults in by_leaf.items()} == {
        "large": 3,
        "small/a": 0,
        "small/b": 0,
        "step": 0,
    }
    problems = {fault.file.removeprefix(f"{data}/"): fault.problem for fault in report.faults}
    assert set(problems) == {"arrays/large/c.0.0", "arrays/large/zarr.json", "arrays/large/c.1.0", "surplus"}
    assert "do not match their hash; the file was altered" in problems["arrays/large/c.0.0"]
    assert "the file does not match its hash" in problems["arrays/large/zarr.json"]
    assert problems["arrays/large/c.1.0"] == f"leaf large: the file {data}/arrays/large/c.1.0 is missing"
    assert problems["surplus"] == f"{data}/surplus: no record names this file"


def test_a_damaged_manifest_and_a_damaged_index_are_faults_not_exceptions(saved: Path) -> None:
    index = data_of(saved) / "index-0.json"
    flip(index, 30)
    assert str(index) in {fault.file for fault in jaxckpt.verify(saved).faults}
    flip(saved / "manifest.json", 60)
    [fault] = jaxckpt.verify(saved).faults
    assert (fault.leaf, fault.file) == ("", str(saved / "manifest.json"))


@pytest.mark.parametrize("call", [jaxckpt.verify, jaxckpt.delete, jaxckpt.gc])
def test_where_nothing_is_the_error_says_so(tmp_path: Path, call: Callable[[Path], Any]) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint|no such directory"):
        call(tmp_path / "nowhere")


def test_a_checkpoint_that_is_overwritten_while_it_is_verified_is_begun_again(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    syscalls_child.save(path, 1, False)
    done = threading.Event()

    def overwrite() -> None:
        for generation in range(2, 60):
            syscalls_child.save(path, generation, True)
        done.set()

    writer = threading.Thread(target=overwrite)
    writer.start()
    attempts = set()
    while not done.is_set():
        report = jaxckpt.verify(path)
        assert report.ok, report.faults
        attempts.add(report.attempt)
    writer.join()
    print(f"{len(attempts)} different checkpoints verified while 58 overwrites ran")
    assert len(attempts) >= 3


def test_gc_removes_what_no_manifest_names_and_nothing_else(tmp_path: Path, saved: Path) -> None:
    syscalls_child.save(str(tmp_path / "deep" / "b"), 3, False)
    left = [*leave(saved), *leave(tmp_path / "deep" / "b"), *leave(tmp_path / "c")]
    foreign = [saved / "notes.txt", tmp_path / "d-1", tmp_path / ("d-" + "g" * 32), tmp_path / ".manifest.json.1"]
    for path in foreign:
        path.write_text("mine")
    report = jaxckpt.gc(tmp_path)
    assert set(report.removed) == {str(path) for path in left}
    assert (report.kept, report.nbytes) == ((), 3 * 112)
    assert [path.read_text() for path in foreign] == ["mine"] * 4
    assert not (tmp_path / "c").exists()
    assert (generation_at(str(saved)), generation_at(str(tmp_path / "deep" / "b"))) == (1, 3)


def test_a_dry_run_of_gc_tells_the_same_and_removes_nothing(tmp_path: Path, saved: Path) -> None:
    left = leave(saved)
    told = jaxckpt.gc(tmp_path, dry_run=True)
    assert all(path.exists() for path in left)
    assert jaxckpt.gc(tmp_path) == told


@pytest.mark.parametrize("age", [TEN_YEARS, -TEN_YEARS], ids=["past", "future"])
def test_gc_removes_what_is_dated_far_away(saved: Path, age: float) -> None:
    left = leave(saved, age)
    assert set(jaxckpt.gc(saved).removed) == {str(path) for path in left}


@pytest.mark.parametrize("age", [0, 3000, -3000])
def test_gc_keeps_what_is_younger_than_the_grace_period(saved: Path, age: float) -> None:
    left = leave(saved, age)
    report = jaxckpt.gc(saved)
    assert report.removed == ()
    assert {path for path, _ in report.kept} == {str(path) for path in left}
    assert all("within the grace period of 3600" in reason for _, reason in report.kept)
    assert jaxckpt.gc(saved, grace_seconds=0).kept == ()


def test_one_young_file_keeps_the_data_around_it(saved: Path) -> None:
    data, temporary = leave(saved)
    os.utime(data / "arrays" / "large" / "c.0")
    report = jaxckpt.gc(saved)
    assert report.removed == (str(temporary),)
    assert [path for path, _ in report.kept] == [str(data)]


@pytest.mark.skipif(shutil.which("faketime") is None, reason="needs faketime")
@pytest.mark.parametrize("when", ["-10y", "+10y"])
def test_a_clock_that_is_wrong_removes_no_checkpoint(saved: Path, when: str) -> None:
    left = leave(saved, 0)
    script = f"import jaxckpt; print(jaxckpt.gc({str(saved)!r}).removed == {tuple(sorted(map(str, left)))!r})"
    done = subprocess.run(
        ["faketime", "-f", when, sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr
    assert generation_at(str(saved)) == 1


@pytest.mark.parametrize("method", ["write", "sync", "put"])
@pytest.mark.parametrize("exists", [False, True], ids=["fresh", "overwrite"])
def test_gc_without_grace_keeps_the_data_of_a_save_that_was_stopped(tmp_path: Path, method: str, exists: bool) -> None:
    path = str(tmp_path / "a")
    if exists:
        syscalls_child.save(path, 1, False)
    process = forked.start(trust_child.save_and_stop, path, method)
    assert process.pid is not None
    wait_until_stopped(process.pid)
    report = jaxckpt.gc(tmp_path, grace_seconds=0)
    assert report.removed == ()
    [(kept, reason)] = report.kept
    assert (os.path.dirname(kept), reason) == (path, "a save is writing it")
    assert generation_at(path) == (1 if exists else None)
    os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0
    assert generation_at(path) == 2


def test_gc_removes_the_data_of_a_save_that_was_killed(saved: Path) -> None:
    process = forked.start(trust_child.save_and_stop, str(saved), "put")
    assert process.pid is not None
    wait_until_stopped(process.pid)
    process.kill()
    process.join()
    [removed] = jaxckpt.gc(saved, grace_seconds=0).removed
    assert Path(removed).parent == saved
    assert generation_at(str(saved)) == 1


def test_without_the_lock_gc_would_take_the_data_of_a_live_save(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = forked.start(trust_child.save_and_stop, str(saved), "put")
    assert process.pid is not None
    wait_until_stopped(process.pid)
    monkeypatch.setattr(LocalLocation, "is_locked", lambda self: False)
    assert len(jaxckpt.gc(saved, grace_seconds=0).removed) == 1
    process.kill()
    process.join()


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_gc_follows_no_link(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    data, temporary = leave(outside)
    root.mkdir()
    (root / "linked").symlink_to(outside)
    (root / LEFT).symlink_to(data)
    (root / TEMPORARY).symlink_to(temporary)
    leave(root / "b")
    (root / "b" / LEFT / "arrays" / "link").symlink_to(outside)
    os.utime(root / "b" / LEFT / "arrays", (0, 0))
    report = jaxckpt.gc(root, grace_seconds=0)
    assert set(report.removed) == {str(root / "b" / LEFT), str(root / "b" / TEMPORARY)}
    assert dict(report.kept) == {str(root / LEFT): "not a directory", str(root / TEMPORARY): "not a file"}
    assert (data / "arrays" / "large" / "c.0").stat().st_size == 100
    assert temporary.exists()


def test_gc_keeps_a_directory_that_holds_files_of_others(saved: Path) -> None:
    data, _ = leave(saved)
    (data / "notes.txt").write_text("mine")
    report = jaxckpt.gc(saved, grace_seconds=0)
    assert report.kept == ((str(data), "it holds files that are not a checkpoint's"),)
    assert (data / "index-0.json").exists()


def test_gc_keeps_all_data_where_the_manifest_cannot_be_read(saved: Path) -> None:
    data, named = leave(saved)[0], data_of(saved)
    flip(saved / "manifest.json", 60)
    report = jaxckpt.gc(saved, grace_seconds=0)
    assert {path for path, _ in report.kept} == {str(data), str(named)}
    assert all("the manifest may name it, but cannot be read" in reason for _, reason in report.kept)
    flip(saved / "manifest.json", 60)
    assert generation_at(str(saved)) == 1


@pytest.mark.parametrize("grace", [-1, float("nan"), "1"])
def test_a_grace_period_that_makes_no_sense_is_refused(tmp_path: Path, grace: Any) -> None:
    with pytest.raises(ValueError, match="expected 0 or more seconds"):
        jaxckpt.gc(tmp_path, grace_seconds=grace)


def test_delete_removes_the_checkpoint_and_its_directory_and_nothing_else(tmp_path: Path, saved: Path) -> None:
    syscalls_child.save(str(tmp_path / "b"), 2, False)
    jaxckpt.delete(saved)
    assert os.listdir(tmp_path) == ["b"]
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint: there is no manifest.json"):
        jaxckpt.delete(saved)


def test_delete_leaves_files_of_others_and_follows_no_link(tmp_path: Path, saved: Path) -> None:
    data = data_of(saved)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_text("mine")
    (data / "link").symlink_to(tmp_path / "outside")
    (saved / "notes.txt").write_text("mine")
    jaxckpt.delete(saved)
    assert os.listdir(saved) == ["notes.txt"]
    assert (tmp_path / "outside" / "mine").read_text() == "mine"


def test_a_delete_that_is_killed_has_deleted_and_gc_removes_the_rest(saved: Path) -> None:
    process = forked.start(trust_child.delete_and_die, str(saved))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert generation_at(str(saved)) is None
    assert len(os.listdir(saved)) == 1
    jaxckpt.gc(saved.parent, grace_seconds=0)
    assert not saved.exists()


def test_the_verify_command_tells_what_is_wrong_and_exits_with_1(saved: Path) -> None:
    sound = command("verify", saved)
    assert sound.exit_code == 0
    assert sound.stdout.startswith(f"{saved}: 4 leaves, ")
    assert command("verify", "--quiet", saved).stdout == ""
    file = data_of(saved) / "arrays" / "large" / "c.0.0"
    flip(file, 0)
    damaged = command("verify", saved)
    assert damaged.exit_code == 1
    first, last = damaged.stdout.splitlines()
    assert first.startswith("damaged: leaf large: ")
    assert f"{file} do not match their hash; the file was altered" in first
    assert last == "1 of 4 leaves damaged, 1 faults"
    found = json.loads(command("verify", "--json", saved).stdout)
    assert (found["ok"], found["leaves"]) == (False, ["large", "small/a", "small/b", "step"])
    assert [(fault["leaf"], fault["file"]) for fault in found["faults"]] == [("large", str(file))]


def test_the_gc_command_tells_what_it_does(saved: Path) -> None:
    data, temporary = leave(saved)
    dry = command("gc", "--dry-run", saved)
    lines = [f"would remove {temporary}", f"would remove {data}", "would remove 2 leftovers, 112 bytes"]
    assert (dry.exit_code, dry.stdout.splitlines()) == (0, lines)
    assert command("gc", saved).stdout == dry.stdout.replace("would remove", "removed")
    leave(saved, 0)
    kept = command("gc", saved)
    assert kept.exit_code == 0
    assert kept.stdout.count("within the grace period of 3600") == 2
    assert "removed 2 leftovers" in command("gc", "--grace-seconds", 0, saved).stdout


def test_the_delete_command_removes_the_checkpoint(saved: Path) -> None:
    assert (command("delete", saved).exit_code, saved.exists()) == (0, False)


@pytest.mark.parametrize("verb", ["verify", "gc", "delete"])
def test_a_command_that_fails_exits_with_1_and_misuse_with_2(tmp_path: Path, verb: str) -> None:
    failed = command(verb, tmp_path / "nowhere")
    assert failed.exit_code == 1
    assert len(failed.stderr.splitlines()) == 1
    assert str(tmp_path / "nowhere") in failed.stderr
    assert command(verb).exit_code == 2
    assert command(verb, tmp_path, "--unknown").exit_code == 2
