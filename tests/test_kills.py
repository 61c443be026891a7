"""A process that saves, overwrites and deletes is killed at random instants, hundreds of times, at one path."""

import collections
import os
import pickle
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
import kills_child
import pytest
from test_syscalls import SEED, assert_clean, generation_at

import jaxckpt
from jaxckpt import CheckpointError, CheckpointNotFoundError

SPARES = 2


class Victim:
    """A process of `kills_child.loop`."""

    def __init__(self, warm: Path, mutant: str) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(60)
        self.process: BaseProcess = forked.start(kills_child.loop, theirs, str(warm), mutant)
        theirs.close()

    def start(self, path: str, generation: int, seed: int) -> None:
        assert self._channel.recv(16) == b"ready"
        self._channel.send(pickle.dumps((path, generation, seed)))

    def heard(self) -> tuple[str, int | None] | None:
        """What it says next; None once it is dead."""
        try:
            message = self._channel.recv(1 << 16)
        except ConnectionResetError:
            return None
        return pickle.loads(message) if message else None

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self._channel.close()


@contextmanager
def victims(warm: Path, mutant: str) -> Generator[collections.deque[Victim]]:
    """Processes that warm up while others are killed."""
    waiting = collections.deque(Victim(warm, mutant) for _ in range(SPARES))
    try:
        yield waiting
    finally:
        for victim in waiting:
            victim.close()


@dataclass
class Oracle:
    """What may be there: after the last operation that was acknowledged, or after the one that was begun since."""

    acknowledged: int | None = None
    begun: int | None = None
    newest: int = 0
    running: bool = False

    def hear(self, message: tuple[str, int | None]) -> None:
        what, generation = message
        self.begun = generation
        self.newest = max(self.newest, generation or 0)
        self.running = what == "begins"
        if what == "done":
            self.acknowledged = generation

    def judge(self, found: int | None) -> str:
        allowed = {self.acknowledged, self.begun} if self.running else {self.acknowledged}
        assert found in allowed, f"there is generation {found}; expected one of {allowed}"
        self.acknowledged = found
        if not self.running:
            return "between two"
        what = "delete" if self.begun is None else "save"
        return f"{what}, {'new' if found == self.begun else 'old'}"


@dataclass
class Campaign:
    """Kills at one path, spread over the length of an operation.

    A kill is aimed at an instant between the beginning of an operation and a bit after its
    usual end, so that some meet the acknowledgement and the next beginning.
    """

    path: str
    chance: random.Random
    oracle: Oracle = field(default_factory=Oracle)
    outcomes: Counter[str] = field(default_factory=Counter)
    acknowledgements: int = 0
    lasted: collections.deque[float] = field(default_factory=lambda: collections.deque([0.02], 50))

    def kill(self, victim: Victim) -> None:
        victim.start(self.path, self.oracle.newest + 1, self.chance.randrange(1 << 30))
        for _ in range(self.chance.randint(1, 3)):
            self._operation(victim)
        self._hear(victim)
        time.sleep(self.chance.uniform(0, 1.2 * statistics.median(self.lasted)))
        victim.kill()
        while message := victim.heard():
            self._note(message)
        self.outcomes[self.oracle.judge(generation_at(self.path))] += 1
        try:
            report = jaxckpt.verify(self.path)
            assert report.ok, report.faults
        except CheckpointNotFoundError:
            assert self.oracle.acknowledged is None

    def _operation(self, victim: Victim) -> None:
        self._hear(victim)
        began = time.monotonic()
        self._hear(victim)
        self.lasted.append(time.monotonic() - began)

    def _hear(self, victim: Victim) -> None:
        message = victim.heard()
        assert message is not None, "the process ended by itself"
        self._note(message)

    def _note(self, message: tuple[str, int | None]) -> None:
        self.oracle.hear(message)
        self.acknowledgements += message[0] == "done"


def run_campaign(tmp_path: Path, number: int, mutant: str = "") -> Campaign:
    campaign = Campaign(str(tmp_path / "a"), random.Random(SEED))
    with victims(tmp_path / "warm", mutant) as waiting:
        for _ in range(number):
            waiting.append(Victim(tmp_path / "warm", mutant))
            victim = waiting.popleft()
            try:
                campaign.kill(victim)
            finally:
                victim.close()
    return campaign


def test_a_process_killed_at_any_instant_leaves_what_it_acknowledged(tmp_path: Path, long: bool) -> None:
    kills = 2000 if long else 300
    campaign = run_campaign(tmp_path, kills)
    left = len(os.listdir(campaign.path))
    there = campaign.oracle.acknowledged is not None
    assert_clean(campaign.path, jaxckpt.verify(campaign.path).attempt if there else None)
    print(
        f"seed {SEED}: {kills} kills, {campaign.acknowledgements} acknowledged operations, 0 lost, 0 mixtures; "
        f"found {dict(campaign.outcomes)}; {left} entries before gc, then only the checkpoint's own"
    )
    assert campaign.outcomes.total() == kills
    assert campaign.outcomes["save, old"] >= kills // 5
    assert campaign.outcomes["save, new"] + campaign.outcomes["delete, new"] >= kills // 20


@pytest.mark.parametrize("mutant", ["manifest in place", "manifest first", "one directory", "early acknowledgement"])
def test_random_kills_catch_a_commit_that_is_wrong(mutant: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    with pytest.raises((AssertionError, CheckpointError)) as caught:
        run_campaign(tmp_path, 300, mutant)
    print(f"{mutant}: {caught.value}")
    assert "ended by itself" not in str(caught.value)
