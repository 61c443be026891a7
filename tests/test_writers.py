"""Writers of one path: exactly one wins, and whoever reads sees one whole tree."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pytest
import syscalls_child
import writers_child
from writers_child import assert_clean, generation_at

import jaxckpt
from jaxckpt import CheckpointExistsError
from jaxckpt._local import LocalLocation

LOST = "somebody else changed manifest.json while this save ran; what they left stays"


@contextmanager
def writers(number: int, *, mutant: bool = False) -> Generator[list[Any]]:
    gate = forked.Barrier(number)
    pipes = [forked.Pipe() for _ in range(number)]
    processes = [forked.start(writers_child.write, theirs, gate, mutant) for _, theirs in pipes]
    try:
        yield [ours for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def one_round(channels: list[Any], path: str, number: int, *, overwrite: bool) -> str:
    """All save at once. Returns what the losers were told, all the same."""
    generations = [number * len(channels) + i + 1 for i in range(len(channels))]
    for channel, generation in zip(channels, generations, strict=True):
        channel.send((path, generation, overwrite))
    answers = [channel.recv() for channel in channels]
    winners = [generation for generation, answer in zip(generations, answers, strict=True) if answer is None]
    assert len(winners) == 1, f"{len(winners)} winners: {answers}"
    assert generation_at(path) == winners[0]
    assert_clean(path)
    [told] = {answer for answer in answers if answer}
    return told


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("number", [2, 4])
def test_one_of_several_processes_wins_and_the_others_are_told(
    tmp_path: Path, number: int, overwrite: bool, long: bool
) -> None:
    rounds = 1000 if long else 100
    syscalls_child.save(str(tmp_path / "0"), 0, False)
    with writers(number) as channels:
        for i in range(rounds):
            path = str(tmp_path / ("0" if overwrite else str(i + 1)))
            told = one_round(channels, path, i, overwrite=overwrite)
            assert told == f"CheckpointExistsError: [Errno 17] {LOST}: {path!r}"
    print(f"{number} writers: {rounds} rounds, 1 winner each, {rounds * (number - 1)} told that they lost, 0 mixtures")


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_two_winners_would_be_found(tmp_path: Path, overwrite: bool) -> None:
    syscalls_child.save(str(tmp_path / "0"), 0, False)
    path = str(tmp_path / ("0" if overwrite else "1"))
    with writers(2, mutant=True) as channels, pytest.raises(AssertionError, match="2 winners"):
        one_round(channels, path, 1, overwrite=overwrite)


def in_threads(path: str, generations: list[int], overwrite: bool) -> list[BaseException | None]:
    def save(generation: int) -> None:
        try:
            syscalls_child.save(path, generation, overwrite)
        except CheckpointExistsError as error:
            failures[generation] = error

    failures: dict[int, BaseException] = {}
    threads = [threading.Thread(target=save, args=(generation,)) for generation in generations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [failures.get(generation) for generation in generations]


def in_background(path: str, generations: list[int], overwrite: bool) -> list[BaseException | None]:
    pending = [
        jaxckpt.start_save(path, syscalls_child.tree(generation), overwrite=overwrite, options=syscalls_child.OPTIONS)
        for generation in generations
    ]
    failures: list[BaseException | None] = []
    for save in pending:
        try:
            save.result()
            failures.append(None)
        except CheckpointExistsError as error:
            failures.append(error)
    return failures


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("save", [in_threads, in_background])
def test_one_of_several_saves_of_one_process_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[..., list[BaseException | None]], overwrite: bool
) -> None:
    syscalls_child.save(str(tmp_path / "0"), 0, False)
    monkeypatch.setattr(LocalLocation, "put", writers_child._gated(LocalLocation.put, threading.Barrier(3)))
    for i in range(1, 11):
        path = str(tmp_path / ("0" if overwrite else str(i)))
        generations = [3 * i, 3 * i + 1, 3 * i + 2]
        failures = save(path, generations, overwrite)
        [winner] = [generation for generation, failure in zip(generations, failures, strict=True) if failure is None]
        assert generation_at(path) == winner
        assert_clean(path)
        assert all(LOST in str(failure) for failure in failures if failure)


def run_together(path: str, seconds: float, *actors: Callable[..., None]) -> list[Counter[str]]:
    stop = forked.Event()
    pipes = [forked.Pipe() for _ in actors]
    processes = [forked.start(actor, theirs, stop, path) for actor, (_, theirs) in zip(actors, pipes, strict=True)]
    try:
        time.sleep(seconds)
        stop.set()
        return [Counter(ours.recv()) for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_writer_delete_reader_verify_and_gc_at_once_see_whole_trees_or_none(tmp_path: Path, long: bool) -> None:
    path = str(tmp_path / "a")
    actors: list[Any] = [writers_child.overwrite_always, writers_child.delete_always, writers_child.read_always]
    actors += [writers_child.verify_always, writers_child.collect_always]
    written, deleted, read, verified, collected = run_together(path, 300 if long else 12, *actors)
    print(f"{dict(written)}, {dict(deleted)}, {dict(read)}, {dict(verified)}, {dict(collected)}")
    assert set(written) <= {"saved", f"CheckpointExistsError: [Errno 17] {LOST}: 'PATH'"}
    assert set(deleted) <= {"deleted", "not found"}
    assert set(read) <= {"read", "nothing"}
    assert set(verified) <= {"verified", "not found"}
    assert set(collected) <= {"removed", "clean", "not found"}
    assert min(written["saved"], deleted["deleted"], read["read"], verified["verified"]) >= 20
    assert_clean(path)


def test_a_checkpoint_that_is_deleted_while_an_overwrite_begins_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jaxckpt.save(tmp_path / "a", {"w": 1})
    listed = LocalLocation.names

    def names(self: LocalLocation) -> list[str] | None:
        found = listed(self)
        if found and "manifest.json" in found:
            monkeypatch.setattr(LocalLocation, "names", listed)
            jaxckpt.delete(tmp_path / "a")
        return found

    monkeypatch.setattr(LocalLocation, "names", names)
    jaxckpt.save(tmp_path / "a", {"w": 2}, overwrite=True)
    assert jaxckpt.restore(tmp_path / "a") == {"w": 2}
