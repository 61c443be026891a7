"""Retention against a model: saves in any order, kills, failing deletions, restores that take long."""

import contextlib
import math
import os
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import hypothesis
import pytest
import retention_child
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from retention_child import OPTIONS, tree

import jaxckpt
from jaxckpt import Checkpointer, KeepBest, StorageError

Metrics = dict[str, float]

few = st.sampled_from([None, None, 1, 3])
steps = st.integers(0, 20)
metrics = st.one_of(
    st.just({}), st.builds(lambda loss: {"loss": loss}, st.sampled_from([0.1, 0.2, 0.3, 0.5, math.inf, math.nan]))
)
wishes = st.lists(st.tuples(steps, metrics), min_size=1, max_size=4, unique_by=lambda wish: wish[0])


class Run(RuleBasedStateMachine):
    """A training run; `known` is what is saved as far as the model knows, with its metrics."""

    @initialize(last=few, every=st.one_of(st.none(), st.integers(4, 9)), best=few, mode=st.sampled_from(["min", "max"]))
    def begin(self, last: int | None, every: int | None, best: int | None, mode: Any) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name) / "run"
        keep_best = KeepBest("loss", mode=mode, count=best) if best else None
        self.arguments: dict[str, Any] = {"keep_last": last, "keep_every": every, "keep_best": keep_best}
        self.last, self.every, self.count, self.sign = last, every, best, 1 if mode == "min" else -1
        self.known: dict[int, Metrics] = {}
        self.ckpt = self.opened()

    def opened(self) -> Checkpointer:
        return Checkpointer(self.root, options=OPTIONS, max_in_flight=2, full_every=4, **self.arguments)

    def best(self, among: dict[int, Metrics]) -> list[int]:
        """All that have a loss, the best first; of equal ones the later is better."""
        losses = {
            step: values["loss"] for step, values in among.items() if not math.isnan(values.get("loss", math.nan))
        }
        return sorted(losses, key=lambda step: (self.sign * losses[step], -step))

    def kept(self, among: dict[int, Metrics]) -> set[int]:
        ordered = sorted(among, reverse=True)
        if self.last is self.every is self.count is None:
            return set(ordered)
        divided = [step for step in ordered if self.every and step % self.every == 0]
        return {ordered[0], *ordered[: self.last or 0], *divided, *self.best(among)[: self.count or 0]}

    # --- what happens

    @rule(wanted=wishes)
    def save(self, wanted: list[tuple[int, Metrics]]) -> None:
        """Save some, without waiting in between; those that are there are overwritten, with the same metrics."""
        self.save_all(wanted)
        self.ckpt.wait()
        self.retain()

    def save_all(self, wanted: list[tuple[int, Metrics]]) -> None:
        for step, values in wanted:
            self.known.setdefault(step, values)
            self.ckpt.save(step, tree(step), metrics=self.known[step], overwrite=True)

    def retain(self) -> None:
        """What a deletion that has gone well leaves."""
        if self.known:
            self.known = {step: self.known[step] for step in self.kept(self.known)}

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 99), values=metrics)
    def change_metrics(self, which: int, values: Metrics) -> None:
        """Overwrite a step, by itself: what others are deleted for depends on when its metrics change."""
        step = sorted(self.known)[which % len(self.known)]
        self.ckpt.save(step, tree(step), metrics=values, overwrite=True)
        self.ckpt.wait()
        self.known[step] = values
        self.retain()

    @rule()
    def reopen(self) -> None:
        self.ckpt.close()
        self.ckpt = self.opened()

    @precondition(lambda self: self.known)
    @rule(which=st.integers(0, 99), wanted=wishes)
    def restore_slowly(self, which: int, wanted: list[tuple[int, Metrics]]) -> None:
        """Restore a step while retention would like to delete it: it stays until it was read."""
        step = sorted(self.known)[which % len(self.known)]
        wanted = [(number, values) for number, values in wanted if number != step]
        with self.restoring(step):
            self.save_all(wanted)
            self.ckpt.wait()
            assert step in self.ckpt.steps(), "a step was deleted while it was being restored"
            held = self.known[step]
            if wanted:
                self.retain()
            self.known[step] = held

    @contextlib.contextmanager
    def restoring(self, step: int) -> Generator[None]:
        """A restore that begins to read when the block begins, and reads on when it ends."""
        entered, go, found = threading.Event(), threading.Event(), []
        restore = jaxckpt._api.restore

        def slow(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            assert go.wait(60)
            return restore(*args, **kwargs)

        with mock.patch("jaxckpt._api.restore", slow):
            thread = threading.Thread(target=lambda: found.append(self.ckpt.restore(step, like=tree(0))))
            thread.start()
            try:
                assert entered.wait(60)
                yield
            finally:
                go.set()
                thread.join()
        assert found
        assert found[0]["step"] == step

    @rule(wanted=wishes)
    def fail_to_delete(self, wanted: list[tuple[int, Metrics]]) -> None:
        """Every deletion fails meanwhile: it is told once, and what is superfluous stays until the next save."""

        def fails(path: str, **_: Any) -> None:
            raise StorageError(5, "Input/output error", path)

        with mock.patch("jaxckpt._api.delete", fails):
            self.save_all(wanted)
            superfluous = set(self.known) - self.kept(self.known)
            with pytest.raises(StorageError, match="Input/output error") if superfluous else contextlib.nullcontext():
                self.ckpt.wait()
            self.ckpt.wait()

    @rule(wanted=wishes, after=st.floats(0, 0.08))
    def crash(self, wanted: list[tuple[int, Metrics]], after: float) -> None:
        """Another process goes on with the run and is killed."""
        self.ckpt.close()
        wanted = [(step, values) for step, values in wanted if step not in self.known]
        durable = self.killed(wanted, after)
        possible = self.known | dict(wanted)
        must = self.known | {step: possible[step] for step in durable}
        self.ckpt = self.opened()
        found = {step: possible[step] for step in self.ckpt.steps()}
        for step in must.keys() - found.keys():
            assert step not in self.kept(found | {step: must[step]}), f"step {step} was to be kept; there are {found}"
        self.known = found

    def killed(self, wanted: list[tuple[int, Metrics]], after: float) -> list[int]:
        """The steps that the process has said are durable."""
        ours, theirs = forked.Pipe()
        process = forked.start(retention_child.saves, theirs, str(self.root), self.arguments, wanted, after)
        theirs.close()
        durable: list[int] = []
        with contextlib.suppress(EOFError), ours:
            while True:
                durable.append(ours.recv())
        process.join()
        assert process.exitcode == -9
        return durable

    # --- what always holds

    @invariant()
    def there_is_what_the_model_says(self) -> None:
        assert self.ckpt.steps() == sorted(self.known)
        assert self.ckpt.latest_step() == max(self.known, default=None)
        if self.known:
            assert self.ckpt.restore(like=tree(0))["step"] == max(self.known)
        if self.count:
            assert self.ckpt.best_step() == next(iter(self.best(self.known)), None)

    def teardown(self) -> None:
        with self.directory:
            self.ckpt.close()
            if self.root.exists():
                self.nothing_else_is_left()

    def nothing_else_is_left(self) -> None:
        assert jaxckpt.gc(self.root, grace_seconds=0).kept == ()
        assert sorted(os.listdir(self.root)) == sorted(map(str, self.known))
        for step in self.known:
            assert jaxckpt.verify(self.root / str(step)).ok
            assert len(os.listdir(self.root / str(step))) == 2, "expected a manifest and its data alone"


# Kills hit other instants when they are repeated, so a failure cannot be made smaller.
Run.TestCase.settings = hypothesis.settings(
    max_examples=12,
    stateful_step_count=20,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


class TestRetention(Run.TestCase):
    """Over 200 operations: the newest, what is kept and what is in use stay; everything else goes."""


# --- found by it, or next to it, one by one


def test_the_newest_is_looked_for_again_when_retention_deletes_what_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Checkpointer(tmp_path, keep_last=1)
    ckpt = Checkpointer(tmp_path)
    restore = jaxckpt._api.restore
    ckpt.save(1, tree(1))
    ckpt.wait()

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        other.save(2, tree(2))
        other.wait()
        return restore(*args, **kwargs)

    monkeypatch.setattr(jaxckpt._api, "restore", overtaken)
    assert ckpt.restore()["step"] == 2
    assert ckpt.steps() == [2]


def test_a_step_whose_metrics_cannot_be_read_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as ckpt:
        for step in range(3):
            ckpt.save(step, tree(step), metrics={"loss": step})

    def fails(self: Checkpointer, step: int) -> Any:
        raise StorageError(5, "Input/output error", str(step))

    with monkeypatch.context() as broken, Checkpointer(tmp_path, keep_best=KeepBest("loss")) as ckpt:
        broken.setattr(Checkpointer, "info", fails)
        ckpt.save(3, tree(3), metrics={"loss": 3})
        ckpt.wait()
        assert ckpt.steps() == [0, 1, 2, 3]
    with Checkpointer(tmp_path, keep_best=KeepBest("loss")) as ckpt:
        ckpt.save(4, tree(4), metrics={"loss": 4})
    assert Checkpointer(tmp_path).steps() == [0, 4]


def test_an_old_step_that_is_being_deleted_is_no_obstacle_to_one_of_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, delete = threading.Event(), threading.Event(), jaxckpt._api.delete

    def slow(path: str, **kwargs: Any) -> None:
        begun.set()
        assert go.wait(60)
        delete(path, **kwargs)

    monkeypatch.setattr(jaxckpt._api, "delete", slow)
    with Checkpointer(tmp_path, keep_last=1) as ckpt:
        ckpt.save(1, tree(1))
        ckpt.save(2, tree(2))
        assert begun.wait(60)
        threading.Timer(0.2, go.set).start()
        pending = ckpt.save(1, tree(1))  # waits: this number is free when the deletion has ended
        assert pending is not None
        pending.result()
    assert Checkpointer(tmp_path).steps() == [2]
