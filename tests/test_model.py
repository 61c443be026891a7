"""Everything that can be done to checkpoints, in any order, against a dict."""

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from multiprocessing.process import BaseProcess
from typing import Any

import forked
import jax
import jax.numpy as jnp
import model_child
import numpy as np
import pytest
import syscalls_child
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from writers_child import assert_clean, generation_at

import jaxckpt
from jaxckpt import CheckpointExistsError, CheckpointNotFoundError, StorageError, UnsupportedLeafError
from jaxckpt._commit import Attempt
from jaxckpt._local import LocalLocation

SEED = int(os.environ.get("JAXCKPT_SEED", time.time_ns() % 1_000_000))

NAMES = st.sampled_from(["a", "b", "deep/er/c"])
STEPS: Counter[str] = Counter()


class OtherProcess:
    """A process of `model_child`, which is replaced when it has died."""

    def __init__(self) -> None:
        self._live: list[tuple[Any, BaseProcess]] = []

    def call(self, *command: Any) -> bool:
        """Whether it came back from that alive."""
        if not self._live:
            ours, theirs = forked.Pipe()
            self._live.append((ours, forked.start(model_child.serve, theirs)))
            theirs.close()
        channel, process = self._live[0]
        channel.send(command)
        try:
            return channel.recv() == "done"
        except (EOFError, ConnectionResetError):
            process.join()
            self._live.clear()
            return False

    def close(self) -> None:
        for _, process in self._live:
            process.kill()
            process.join()


OTHER = OtherProcess()


@contextlib.contextmanager
def failing(method: str) -> Generator[None]:
    """The next call of a method of the storage fails."""
    original = getattr(LocalLocation, method)

    def once(self: LocalLocation, *args: Any, **kwargs: Any) -> Any:
        setattr(LocalLocation, method, original)
        raise StorageError(errno.EIO, "Input/output error", self.path)

    setattr(LocalLocation, method, once)
    try:
        yield
    finally:
        setattr(LocalLocation, method, original)


def save(path: str, generation: int, overwrite: bool) -> None:
    syscalls_child.save(path, generation, overwrite)


def save_async(path: str, generation: int, overwrite: bool) -> None:
    tree = syscalls_child.tree(generation)
    asyncio.run(jaxckpt.save_async(path, tree, overwrite=overwrite, options=syscalls_child.OPTIONS))


def start_save(path: str, generation: int, overwrite: bool) -> None:
    tree = syscalls_child.tree(generation)
    pending = jaxckpt.start_save(path, tree, overwrite=overwrite, options=syscalls_child.OPTIONS)
    tree["small"]["b"][:] = -1
    pending.result()


SAVES = st.sampled_from([save, save_async, start_save])


class Checkpoints(RuleBasedStateMachine):
    """The real thing beside `expected`, which has the generation of each path that holds a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(prefix="jaxckpt-model-")
        self.expected: dict[str, int] = {}
        self.generation = 0

    def teardown(self) -> None:
        for name in ("a", "b", "deep/er/c"):
            self.agree(name)
            assert_clean(self.path(name))
        shutil.rmtree(self.root)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def next(self) -> int:
        self.generation += 1
        return self.generation

    def agree(self, name: str) -> None:
        assert generation_at(self.path(name)) == self.expected.get(name)

    def count(self, what: str) -> None:
        STEPS[what] += 1

    @rule(name=NAMES, how=SAVES, overwrite=st.booleans())
    def saves(self, name: str, how: Callable[..., None], overwrite: bool) -> None:
        self.count(how.__name__)
        generation = self.next()
        if name in self.expected and not overwrite:
            with pytest.raises(CheckpointExistsError, match="a checkpoint is there already"):
                how(self.path(name), generation, False)
        else:
            how(self.path(name), generation, overwrite)
            self.expected[name] = generation
        self.agree(name)

    @rule(name=NAMES)
    def saves_what_cannot_be_saved(self, name: str) -> None:
        self.count("unsupported leaf")
        with pytest.raises(UnsupportedLeafError):
            jaxckpt.save(self.path(name), {"n": np.arange(3), "o": object()}, overwrite=True)
        self.agree(name)

    @rule(name=NAMES, how=SAVES, method=st.sampled_from(["put", "sync", "write", "make"]))
    def saves_onto_a_storage_that_fails(self, name: str, how: Callable[..., None], method: str) -> None:
        self.count(f"fault in {method}")
        before = generation_at(self.path(name))
        generation = self.next()
        with failing(method), pytest.raises(StorageError, match="Input/output error"):
            how(self.path(name), generation, True)
        assert generation_at(self.path(name)) == before == self.expected.get(name)

    @rule(name=NAMES)
    def deletes(self, name: str) -> None:
        self.count("delete")
        if name in self.expected:
            jaxckpt.delete(self.path(name))
            del self.expected[name]
        else:
            with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
                jaxckpt.delete(self.path(name))
        self.agree(name)

    @rule()
    def collects(self) -> None:
        self.count("gc")
        jaxckpt.gc(self.root, grace_seconds=0)
        for name in ("a", "b", "deep/er/c"):
            self.agree(name)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def restores_to_what_is_wanted(self, data: st.DataObject) -> None:
        self.count("restore")
        name = data.draw(st.sampled_from(sorted(self.expected)))
        values = syscalls_child.values(self.expected[name])
        device = jax.sharding.SingleDeviceSharding(jax.devices()[data.draw(st.integers(0, 7))])
        like = {
            "large": jax.ShapeDtypeStruct((8, 1024), jnp.int32, sharding=device),
            "small": {"a": np.zeros(10, np.int32), "b": np.zeros(7, np.int64)},
            "step": 0,
        }
        found = jaxckpt.restore(self.path(name), like)
        assert found["large"].sharding == device
        jax.tree.map(np.testing.assert_array_equal, found, values)

    @rule(name=NAMES)
    def verifies(self, name: str) -> None:
        self.count("verify")
        if name in self.expected:
            report = jaxckpt.verify(self.path(name))
            assert report.ok, report.faults
        else:
            with pytest.raises(CheckpointNotFoundError):
                jaxckpt.verify(self.path(name))

    @rule(name=NAMES)
    def is_saved_by_another_process(self, name: str) -> None:
        self.count("save of another process")
        generation = self.next()
        assert OTHER.call("save", 0, self.path(name), generation, True)
        self.expected[name] = generation
        self.agree(name)

    @rule(name=NAMES, fsync=st.integers(1, 14))
    def another_process_dies_in_a_save(self, name: str, fsync: int) -> None:
        generation = self.next()
        alive = OTHER.call("save", fsync, self.path(name), generation, True)
        self.count("save of another process" if alive else "kill in a save")
        found = generation_at(self.path(name))
        assert found in ({generation} if alive else {self.expected.get(name), generation})
        if found is not None:
            self.expected[name] = found

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def another_process_dies_in_a_delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        alive = OTHER.call("delete", 1, self.path(name))
        self.count("delete of another process" if alive else "kill in a delete")
        found = generation_at(self.path(name))
        assert found in (self.expected[name], None)
        if found is None:
            del self.expected[name]


def run(examples: int, steps: int) -> None:
    STEPS.clear()
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(seed(SEED)(Checkpoints), settings=chosen)


@pytest.fixture(autouse=True, scope="module")
def other() -> Generator[None]:
    yield
    OTHER.close()


def test_no_sequence_of_operations_and_faults_differs_from_a_dict(long: bool) -> None:
    run(*((200, 50) if long else (14, 40)))
    faults = sum(count for what, count in STEPS.items() if "fault" in what or "kill" in what)
    print(f"seed {SEED}: {STEPS.total()} steps, 0 divergences; {faults} faults and kills; {dict(STEPS)}")
    assert STEPS.total() >= (2000 if long else 200)
    assert faults >= STEPS.total() // 10
    assert min(STEPS[what] for what in ("kill in a save", "fault in put", "delete", "gc", "restore")) >= 1


def nothing(self: LocalLocation, *args: Any, **kwargs: Any) -> None:
    pass


def test_a_commit_that_is_forgotten_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLocation, "put", nothing)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(12, 40)


def test_an_error_that_is_hidden_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Attempt.sync

    def quiet(self: Attempt, directories: Any) -> None:
        with contextlib.suppress(StorageError):
            sync(self, directories)

    monkeypatch.setattr(Attempt, "sync", quiet)
    print(f"seed {SEED}")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(12, 40)
