"""Object stores that fail, lie, stall and die: the right result or an error that names the object; never a mixture."""

import concurrent.futures
import contextlib
import itertools
import logging
import queue
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import proxy
import pytest
import stores

import jaxckpt
from jaxckpt import _location

OLD, NEW = 1, 2
RETRY_SECONDS = 3
THREADS = 10
DEADLINE_SECONDS = 60  # of a request that hangs libcurl notices a part only


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.SeaweedFS]:
    if reason := stores.missing("weed"):
        pytest.skip(reason)
    with stores.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as store:
        yield store


def tree(value: int) -> dict[str, Any]:
    return {"w": np.full(1 << 16, value), "v": value}


OPTIONS = jaxckpt.SaveOptions(pack_below_bytes=0)

Call = Callable[[str, dict[str, Any]], Any]


def save(url: str, options: dict[str, Any]) -> None:
    jaxckpt.save(url, tree(NEW), overwrite=True, options=OPTIONS, storage_options=options)


def save_verified(url: str, options: dict[str, Any]) -> None:
    checked = jaxckpt.SaveOptions(pack_below_bytes=0, verify_after_save=True)
    jaxckpt.save(url, tree(NEW), overwrite=True, options=checked, storage_options=options)


def restore(url: str, options: dict[str, Any]) -> int:
    found = jaxckpt.restore(url, storage_options=options)
    assert (found["w"] == found["v"]).all()
    return found["v"]


def delete(url: str, options: dict[str, Any]) -> None:
    jaxckpt.delete(url, storage_options=options)


# What is asked for, and the requests of it that go wrong.
TARGETS: dict[str, tuple[Call, str, str]] = {
    "put data": (save, "put", r"/c\.0$"),
    "put data, verified": (save_verified, "put", r"/c\.0$"),
    "put index": (save, "put", r"index-0\.json$"),
    "put commit": (save, "put", r"/manifest\.json$"),
    "look at commit": (save, "get", r"/manifest\.json$"),
    "get manifest": (restore, "get", r"/manifest\.json$"),
    "get index": (restore, "get", r"index-0\.json$"),
    "get data": (restore, "get", r"/c\.0$"),
    "list": (save, "list", ""),
    "head": (delete, "head", ""),
    "delete": (delete, "delete", ""),
}


PASSING = ("503", "429", "500", "409", "reset", "lost_answer", "half_body", "truncated", "slow")
"""What must be got over where it happens once."""


@dataclass(frozen=True)
class Case:
    target: str
    kind: str
    lasting: bool

    def __str__(self) -> str:
        return f"{self.target}, {self.kind} {'always' if self.lasting else 'once'}"


def outcome_of(case: Case, seaweed: stores.SeaweedFS, between: proxy.FaultProxy) -> tuple[str, int]:
    """What came of a case, "right" or the type of the error, and how many faults were injected."""
    call, verb, pattern = TARGETS[case.target]
    url, direct = seaweed.url(f"faults/{uuid.uuid4().hex}"), seaweed.storage_options
    jaxckpt.save(url, tree(OLD), options=OPTIONS, storage_options=direct)
    options = seaweed.behind(between.endpoint).storage_options | {"retry_seconds": RETRY_SECONDS}
    between.clear()
    restore(url, options)
    jaxckpt.save(f"{url}-probed", {"v": 1}, storage_options=options)
    between.inject(proxy.Fault(case.kind, verb, pattern, times=None if case.lasting else 1))
    began = time.monotonic()
    said = "right"
    try:
        result = call(url, options)
        assert result in (None, OLD), f"{case}: restored {result}"
    except jaxckpt.CheckpointError as error:
        said = type(error).__name__
        assert url.rpartition("/")[2] in str(error), f"{case}: {error} does not name the object"
    assert time.monotonic() - began < DEADLINE_SECONDS, f"{case}: took too long"
    injected = between.injected
    between.clear()
    check_what_is_there(case, said, url, direct)
    return said, injected


def check_what_is_there(case: Case, said: str, url: str, direct: dict[str, Any]) -> None:
    """Old or new, and the one that the outcome says."""
    call = TARGETS[case.target][0]
    try:
        found: int | None = restore(url, direct)
    except jaxckpt.CheckpointNotFoundError:
        found = None
    except jaxckpt.CorruptCheckpointError:
        assert case.kind == "flip_out", case
        assert call is save, case
        # What was altered on its way is found out when it is read, a commit at once.
        assert said == ("UnsettledCommitError" if case.target == "put commit" else "right"), case
        return
    if call is restore:
        assert found == OLD, case
    elif call is delete:
        assert found == (None if said == "right" else found), case
        assert found in (None, OLD), case
    elif said == "right":
        assert found == NEW, case
    elif said == "UnsettledCommitError":
        assert found in (OLD, NEW), case
    else:
        assert found == OLD, f"{case}: {said}, yet {found} is there"


def test_a_fault_of_any_kind_in_any_request_ends_well_or_with_an_error_that_names_the_object(
    seaweed: stores.SeaweedFS,
) -> None:
    cases = list(itertools.starmap(Case, itertools.product(TARGETS, proxy.KINDS, (False, True))))
    problems, hit = [], Counter[str]()
    # One proxy a thread, not a case: each endpoint's client stays, and collecting so many Python objects takes seconds.
    free = queue.SimpleQueue[proxy.FaultProxy]()

    def run(case: Case) -> tuple[str, int]:
        between = free.get()
        try:
            return outcome_of(case, seaweed, between)
        finally:
            free.put(between)

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for _ in range(THREADS):
            free.put(stack.enter_context(proxy.FaultProxy(seaweed.endpoint)))
        running = {pool.submit(run, case): case for case in cases}
        for done in concurrent.futures.as_completed(running):
            case = running[done]
            try:
                said, injected = done.result()
            except Exception as error:  # noqa: BLE001, all are shown together
                problems.append(f"{case}: {type(error).__name__}: {error}")
                continue
            hit[said] += bool(injected)
            if injected and not case.lasting and case.kind in PASSING and said != "right":
                problems.append(f"{case}: {said}")
    assert not problems, "\n".join(problems)
    assert hit.total() >= 150, hit
    print(f"{hit.total()} faults: {dict(hit)}")


IGNORED = r"it ignores If-(None-)?Match on a put, .* pass storage_options=.*single_writer"
REASONS = {"rclone": "a part of an object is not what was asked for"}


@pytest.mark.parametrize("bad", stores.BAD)
def test_a_store_that_ignores_preconditions_is_refused_with_its_reason(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, program = stores.BAD[bad]
    if reason := stores.missing(program):
        pytest.skip(reason)
    with start(tmp_path) as store:
        if store.scheme == "gs":
            monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", store.endpoint)
        with pytest.raises(
            jaxckpt.StorageError, match=rf"this store cannot hold checkpoints: {REASONS.get(bad, IGNORED)}"
        ):
            jaxckpt.save(store.url("a"), tree(OLD), storage_options=store.storage_options)
        with pytest.raises(jaxckpt.CheckpointNotFoundError):
            jaxckpt.restore(store.url("a"), storage_options=store.storage_options)
        if bad in REASONS:
            return  # it is not fit for one writer either
        alone = store.storage_options | {"single_writer": True}
        jaxckpt.save(store.url("a"), tree(OLD), storage_options=alone)
        assert restore(store.url("a"), alone) == OLD


def test_a_small_save_of_many_leaves_takes_few_objects_and_few_requests(seaweed: stores.SeaweedFS) -> None:
    leaves = {f"leaf{number}": np.full(1 << 14, number, np.float32) for number in range(2000)}
    with proxy.FaultProxy(seaweed.endpoint) as between:
        options = seaweed.behind(between.endpoint).storage_options
        url = seaweed.url(uuid.uuid4().hex)
        jaxckpt.save(f"{url}/first", {"v": 1}, storage_options=options)  # which also probes the store
        between.clear()
        big = jaxckpt.SaveOptions(max_host_bytes=1 << 30)
        jaxckpt.save(f"{url}/a", leaves, options=big, storage_options=options)
        assert between.count("put") <= 10
        between.clear()
        found = jaxckpt.restore(
            f"{url}/a", options=jaxckpt.RestoreOptions(max_host_bytes=1 << 30), storage_options=options
        )
        assert between.count("get") <= 10
        assert between.count() == between.count("get")
    assert all((found[name] == leaf).all() for name, leaf in leaves.items())


def test_a_server_that_is_killed_and_comes_back_loses_nothing(tmp_path: Path) -> None:
    if reason := stores.missing("weed"):
        pytest.skip(reason)
    with stores.seaweedfs(tmp_path) as store:
        url = store.url("a")
        jaxckpt.save(url, tree(OLD), options=OPTIONS, storage_options=store.storage_options)
        pending = jaxckpt.start_save(
            url,
            {str(number): np.full(1 << 20, NEW) for number in range(16)},
            overwrite=True,
            options=OPTIONS,
            storage_options=store.storage_options,
        )
        store.kill()
        time.sleep(0.5)
        store.restart()
        pending.result()
        found = jaxckpt.restore(url, storage_options=store.storage_options)
        assert all((leaf == NEW).all() for leaf in found.values())
        assert jaxckpt.verify(url, storage_options=store.storage_options).ok


def test_no_error_log_or_file_holds_a_secret(
    seaweed: stores.SeaweedFS, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="jaxckpt")
    url = seaweed.url(uuid.uuid4().hex)
    secrets = {name: uuid.uuid4().hex for name in ("key", "secret", "token")}
    errors = []
    wrong = seaweed.storage_options | secrets | {"retry_seconds": 2}
    for call in (save, restore, delete):
        with pytest.raises(jaxckpt.CheckpointError) as raised:
            call(url, wrong)
        errors.append(f"{raised.value!r} {raised.value} {raised.getrepr(style='long', showlocals=False)}")
    for mistake in ({"region": 5, "nonsense": 1}, {"retry_seconds": -1}):
        with pytest.raises(ValueError, match="nonsense|retry_seconds") as raised:
            save(url, wrong | mistake)
        errors.append(str(raised.value))
    save(url, seaweed.storage_options)
    location = _location.parse(url, seaweed.storage_options)
    stored = b"".join(location.read(name) for name in location.files() if name.endswith(".json")).decode()
    seen = "\n".join([*errors, repr(location), stored, caplog.text, *capfd.readouterr()])
    for secret in (*secrets.values(), seaweed.key, seaweed.secret):
        assert not re.search(re.escape(secret), seen), secret
