"""Every storage call of a save, an overwrite, a delete, a collection and a serialization is killed, failed, cut short.

SQLite's loop: the fault meets call 0, then call 1, and so on until a run ends without meeting
it. After each, what is there is exactly the old or exactly the new, the error tells what the
system said, the same call works again without a hand, and `gc` leaves nothing else.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import syscalls
import syscalls_child
from syscalls import ERRNOS, WRITES, Child, Fault, Outcome

import jaxckpt
from jaxckpt import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

pytestmark = pytest.mark.skipif(bool(syscalls.why_not()), reason=str(syscalls.why_not()))

SEED = int(os.environ.get("JAXCKPT_SEED", time.time_ns() % 1_000_000))

MUST_SURFACE = frozenset({*WRITES, "fsync", "rename", "link"})
"""Calls whose failure no save may keep to itself: bytes or names would be missing. Interrupted ones may be retried."""


def generation_at(path: str) -> int | None:
    """The generation of the checkpoint at `path`, None where there is none; all of it is of that one, byte for byte."""
    try:
        found = jaxckpt.restore(path)
    except CheckpointNotFoundError:
        return None
    assert_of_one_generation(found)
    return found["step"]


def assert_of_one_generation(found: Any) -> None:
    expected = syscalls_child.values(found["step"])
    for leaf, other in (
        (found["large"], expected["large"]),
        *((found["small"][name], expected["small"][name]) for name in ("a", "b")),
    ):
        assert leaf.dtype == other.dtype
        assert np.array_equal(leaf, other), f"a mixture: not all of the checkpoint is of generation {found['step']}"


def array_at(path: str, name: str) -> int | None:
    """The generation of an array that `async_serialize` wrote."""
    expected = syscalls_child.values(0)
    like = expected["large"] if name == "large" else expected["small"]["a"]
    try:
        [found] = asyncio.run(jaxckpt.async_deserialize([f"{path}/{name}"], [like]))
    except CheckpointNotFoundError:
        return None
    generation, rest = divmod(int(found.flat[0]), 10_000)
    assert rest == 0
    assert np.array_equal(found, like + generation * 10_000), "a mixture"
    return generation


def assert_clean(path: str, attempt: str | None) -> None:
    """A collection without grace leaves the manifest and its data, or nothing at all."""
    if Path(path).exists():
        assert jaxckpt.gc(path, grace_seconds=0).kept == ()
    left = sorted(os.listdir(path)) if Path(path).exists() else []
    assert left == ([f"d-{attempt}", "manifest.json"] if attempt else [])


class Checkpoints:
    """What is common to the operations on checkpoints."""

    def state(self, path: str) -> int | None:
        return generation_at(path)

    def check(self, path: str, state: int | None) -> None:
        attempt = None
        if state is None:
            with pytest.raises(CheckpointNotFoundError):
                jaxckpt.verify(path)
        else:
            report = jaxckpt.verify(path)
            attempt, faults = report.attempt, "; ".join(fault.problem for fault in report.faults)
            assert not faults, faults
        assert_clean(path, attempt)


class Fresh(Checkpoints):
    def prepare(self, path: str, child: Child) -> None:
        pass

    def command(self, path: str) -> tuple[Any, ...]:
        return "save", path, 2, False

    def named(self, state: Any) -> str:
        return {None: "old", 2: "new"}[state]


class Overwrite(Fresh):
    def prepare(self, path: str, child: Child) -> None:
        assert child.run("save", path, 1, True).failure is None

    def command(self, path: str) -> tuple[Any, ...]:
        return "save", path, 2, True

    def named(self, state: Any) -> str:
        return {1: "old", 2: "new"}[state]


class Delete(Overwrite):
    def command(self, path: str) -> tuple[Any, ...]:
        return "delete", path

    def named(self, state: Any) -> str:
        return {1: "old", None: "new"}[state]


class Collection(Overwrite):
    """What a killed save left, beside a checkpoint that must not suffer."""

    def prepare(self, path: str, child: Child) -> None:
        super().prepare(path, child)
        data = Path(path, "d-" + "0" * 32)
        (data / "arrays" / "large").mkdir(parents=True)
        for name in ("index-0.json", "arrays/large/c.0.0", "arrays/large/c.1.0"):
            (data / name).write_text("left")
        Path(path, ".manifest.json." + "0" * 32).write_text("left")

    def command(self, path: str) -> tuple[Any, ...]:
        return "gc", path

    def named(self, state: Any) -> str:
        return {1: "new"}[state]


class Restore(Overwrite):
    """Nothing is to change. The child looks at what it has got."""

    def command(self, path: str) -> tuple[Any, ...]:
        return "restore", path

    def named(self, state: Any) -> str:
        return {1: "new"}[state]


class Serialization:
    """Two arrays without a manifest: each is there or not; one that is replaced may also be gone."""

    def prepare(self, path: str, child: Child) -> None:
        pass

    def command(self, path: str) -> tuple[Any, ...]:
        return "serialize", path, 2, False

    def state(self, path: str) -> Any:
        return array_at(path, "large"), array_at(path, "a")

    def named(self, state: Any) -> str:
        assert set(state) <= {None, 2}
        return "new" if state == (2, 2) else "old"

    def check(self, path: str, state: Any) -> None:
        if Path(path).exists():
            assert jaxckpt.gc(path, grace_seconds=0).kept == ()
        if state == (2, 2):
            for name, chunks in ("large", 4), ("a", 1):
                assert sum(file.startswith("c") for file in os.listdir(f"{path}/{name}")) == chunks
                assert len(os.listdir(f"{path}/{name}")) == chunks + 2  # and the index and the metadata


class Reserialization(Serialization):
    def prepare(self, path: str, child: Child) -> None:
        assert child.run("serialize", path, 1, True).failure is None

    def command(self, path: str) -> tuple[Any, ...]:
        return "serialize", path, 2, True

    def named(self, state: Any) -> str:
        assert set(state) <= {None, 1, 2}
        return "new" if state == (2, 2) else "old"


Scenario = Fresh | Serialization

SCENARIOS = {
    "a save": Fresh(),
    "an overwrite": Overwrite(),
    "a delete": Delete(),
    "a collection": Collection(),
    "a restore": Restore(),
    "a serialization": Serialization(),
    "a serialization over another": Reserialization(),
}
LEAST_CALLS = {"a save": 90, "an overwrite": 120, "a delete": 35, "a collection": 20, "a restore": 15}


@dataclass
class Tally:
    """What was injected and what came of it."""

    kills: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome, state: str, number: int = 0) -> None:
        self.kills += outcome.killed
        if not outcome.killed:
            self.errors[errno.errorcode.get(number, "damaged writes")] += len(outcome.injected)
        how = "killed" if outcome.killed else "raised" if outcome.failure else "returned"
        self.outcomes[f"{how}, {state}"] += 1
        self.calls[outcome.injected[0].name] += 1

    def __str__(self) -> str:
        met = f"{self.kills} kills, errors {dict(self.errors)}"
        return f"{met}; outcomes {dict(self.outcomes)}; at calls {dict(self.calls)}"


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    path = tmp_path / "storage"
    path.mkdir()
    return path


def paths(storage: Path) -> Iterator[str]:
    """A place that nobody has used, below a directory that a save has to make, again and again."""
    for number in itertools.count():
        yield str(storage / str(number) / "a")
        shutil.rmtree(storage / str(number), ignore_errors=True)


def again(scenario: Scenario, path: str, child: Child | None) -> None:
    """The same call again, without a fault; afterwards the new is there and nothing else."""
    function, *args = scenario.command(path)
    args[2:] = [True] * len(args[2:])
    if child is not None:
        failure = child.run(function, *args).failure
        assert failure is None or "CheckpointNotFoundError" in failure.classes, failure
    elif function != "delete" or scenario.state(path) is not None:
        syscalls_child.FUNCTIONS[function](*args)
    state = scenario.state(path)
    assert scenario.named(state) == "new"
    scenario.check(path, state)


def kill_everywhere(
    scenario: Scenario, storage: Path, mutant: str = "", only: frozenset[str] = frozenset(), first: int = 0
) -> Tally:
    tally = Tally()
    with syscalls.spares(lambda: Child(syscalls_child.serve, str(storage), mutant), 2) as take:
        for at, path in zip(itertools.count(first), paths(storage)):
            with take() as child:
                scenario.prepare(path, child)
                outcome = child.run(*scenario.command(path), fault=Fault(at, "kill", only=only))
            assert outcome.killed == bool(outcome.injected)
            if not outcome.killed:
                break
            state = scenario.state(path)
            tally.add(outcome, scenario.named(state))
            scenario.check(path, state)
            again(scenario, path, None)
    return tally


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "a restore"])
def test_a_kill_at_any_storage_call_leaves_old_or_new(name: str, storage: Path) -> None:
    tally = kill_everywhere(SCENARIOS[name], storage)
    print(f"{name}: {tally}")
    assert tally.kills >= LEAST_CALLS.get(name, 60)


def fail(scenario: Scenario, child: Child, path: str, fault: Fault) -> tuple[Outcome, str]:
    """One run under `fault`, judged."""
    scenario.prepare(path, child)
    outcome = child.run(*scenario.command(path), fault=fault)
    assert not outcome.killed
    state = scenario.state(path)
    if outcome.injected:
        judge(outcome, fault, scenario.named(state))
    scenario.check(path, state)
    again(scenario, path, child)
    return outcome, scenario.named(state)


def judge(outcome: Outcome, fault: Fault, state: str) -> None:
    failure = outcome.failure
    told = f"{fault} at {outcome.injected[0]}: {failure}"
    if failure is None:
        assert state == "new", told
        assert fault.errno in (0, errno.EINTR) or not any(call.name in MUST_SURFACE for call in outcome.injected), told
        return
    assert fault.errno, told
    assert {"CheckpointError", "OSError"} <= set(failure.classes), told
    assert failure.errno == fault.errno, told
    assert failure.filename, told
    assert failure.filename in failure.text, told


LENGTHS: list[tuple[Literal["nothing", "same", "all"], int]] = [
    ("nothing", 1),
    ("all", 5),
    ("same", sys.maxsize),
    ("all", sys.maxsize),
]
"""What follows the call that fails, and how many may fail: that call alone, a storage that fails and comes back, all
calls of the same name, a storage that is gone."""


def faults_at(at: int, long: bool, only: frozenset[str]) -> list[Fault]:
    """Faults that meet call `at`. In the short form errors and the two endless lengths take turns.

    Who is interrupted may try again for ever, so interruptions end after some; a storage does not fail by them.
    """
    every = [
        [
            Fault(at, "error", number, after, only, min(most, 20) if number == errno.EINTR else most)
            for number in ERRNOS
            if number != errno.EINTR or after != "all"
        ]
        for after, most in LENGTHS
    ]
    if long:
        return list(itertools.chain(*every))
    turn = SEED + at
    lengths = every[0], every[1], every[2 + turn % 2]
    return [faults[(turn + 3 * number) % len(faults)] for number, faults in enumerate(lengths)]


def fail_everywhere(
    scenario: Scenario, storage: Path, long: bool, mutant: str = "", only: frozenset[str] = frozenset()
) -> Tally:
    tally = Tally()
    places = paths(storage)
    with contextlib.ExitStack() as children:
        child = None
        for at in itertools.count():
            if child is None or at % 10 == 0:  # a failed close leaves /dev/null open in the child
                children.close()
                child = children.enter_context(Child(syscalls_child.serve, str(storage), mutant))
            for fault in faults_at(at, long, only):
                outcome, state = fail(scenario, child, next(places), fault)
                if not outcome.injected:
                    return tally
                tally.add(outcome, state, fault.errno)
    raise AssertionError("unreachable")


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_error_at_any_storage_call_is_raised_and_leaves_old_or_new(name: str, storage: Path, long: bool) -> None:
    print(f"seed {SEED}")
    tally = fail_everywhere(SCENARIOS[name], storage, long)
    print(f"{name}: {tally}")
    assert sum(tally.outcomes.values()) >= 3 * LEAST_CALLS.get(name, 60)


@pytest.mark.parametrize("after", ["nothing", "same"])
@pytest.mark.parametrize("name", ["a save", "an overwrite", "a serialization"])
def test_a_write_that_stops_half_way_is_continued(name: str, after: Any, storage: Path) -> None:
    """The first half of the bytes is written in the child's place, and the child is told so."""
    tally = Tally()
    with Child(syscalls_child.serve, str(storage)) as child:
        for at, path in zip(itertools.count(), paths(storage)):
            outcome, state = fail(SCENARIOS[name], child, path, Fault(at, "short", after=after, only=WRITES))
            if not outcome.injected:
                break
            assert outcome.failure is None
            tally.add(outcome, state)
    print(f"{name}: {tally}")
    assert tally.outcomes["returned, new"] >= 7


@pytest.mark.parametrize("name", ["a save", "an overwrite"])
def test_a_write_that_never_happens_is_found_by_whoever_reads(name: str, storage: Path) -> None:
    """No save can know that the system lied, but no restore takes the hole for the data."""
    scenario, tally = SCENARIOS[name], Tally()
    with Child(syscalls_child.serve, str(storage)) as child:
        for at, path in zip(itertools.count(), paths(storage)):
            scenario.prepare(path, child)
            outcome = child.run(*scenario.command(path), fault=Fault(at, "lie", only=WRITES))
            if not outcome.injected:
                break
            tally.add(outcome, "damaged")
            assert outcome.failure is None
            assert not jaxckpt.verify(path).ok
            if outcome.injected[0].path.endswith("zarr.json"):  # which a restore does not need
                assert scenario.named(scenario.state(path)) == "new"
            else:
                with pytest.raises(CorruptCheckpointError):
                    jaxckpt.restore(path)
    print(f"{name}: {tally}")
    assert tally.outcomes["returned, damaged"] >= 8


@pytest.mark.parametrize(
    ("mutant", "only", "first", "sign"),
    [
        ("manifest in place", "write", 0, "not a jaxckpt manifest"),
        ("manifest first", "rename", 0, "the index file is missing"),
        ("one directory", "rename", 0, "no record names this file"),
        ("one directory", "rename", 2, "do not match their hash"),
    ],
)
def test_the_kills_catch_a_commit_that_is_wrong(mutant: str, only: str, first: int, sign: str, storage: Path) -> None:
    with pytest.raises((AssertionError, CheckpointError), match=sign):
        kill_everywhere(SCENARIOS["an overwrite"], storage, mutant, frozenset({only}), first)


@pytest.mark.parametrize(
    ("mutant", "only", "sign"),
    [
        ("unsynced directories", "fsync", "damage='error'"),
        ("raw errors", "flock", "damage='error'"),
        ("one error for all", "writev", "damage='error'"),
        ("doubt taken for failure", "fsync", "the index file is missing"),
    ],
)
def test_the_errors_catch_a_save_that_takes_them_lightly(mutant: str, only: str, sign: str, storage: Path) -> None:
    print(f"seed {SEED}")
    with pytest.raises((AssertionError, CheckpointError), match=sign):
        fail_everywhere(SCENARIOS["a save"], storage, False, mutant, frozenset({only}))
