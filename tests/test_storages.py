"""Every storage keeps the same promises: one suite, on a local disk, in memory, on S3 and on Google Cloud Storage."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cluster
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stores
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import _location

RunScript = Callable[..., subprocess.CompletedProcess[str]]

KINDS = ("local", "memory", "s3", "gs")


@dataclass
class Place:
    """Where a test may write, and the test's own way to what is there."""

    kind: str
    root: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.root

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    @property
    def location(self) -> _location.Location:
        return _location.parse(self.root, self.storage_options)

    def files(self, name: str = "") -> dict[str, bytes]:
        below = self.location.child(name)
        return {key: below.read(key) for key in below.files()}

    def write(self, name: str, data: bytes) -> None:
        """Put a file there, whatever is there."""
        parent, _, last = name.rpartition("/")
        below = self.location.child(parent)
        below.make()
        if below.is_file(last):
            below.unlink(last)
        below.write(last, data)

    def options(self) -> dict[str, Any]:
        return {"storage_options": self.storage_options or None}


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.SeaweedFS]:
    if reason := stores.missing("weed"):
        pytest.skip(reason)
    with stores.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as store:
        yield store


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Store]:
    if reason := stores.missing("fake-gcs-server"):
        pytest.skip(reason)
    with stores.fake_gcs(tmp_path_factory.mktemp("gcs")) as store:
        yield store


def make_place(kind: str, request: pytest.FixtureRequest) -> Place:
    name = uuid.uuid4().hex
    if kind == "local":
        return Place(kind, str(request.getfixturevalue("tmp_path") / name))
    if kind == "memory":
        return Place(kind, f"memory://tests/{name}")
    store = request.getfixturevalue("seaweed" if kind == "s3" else "gcs")
    if kind == "gs":  # TensorStore has one endpoint for all of gs://
        request.getfixturevalue("monkeypatch").setenv("TENSORSTORE_GCS_HTTP_URL", store.endpoint)
    return Place(kind, store.url(name), store.storage_options, store.environment)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    return make_place(request.param, request)


@pytest.fixture(params=[kind for kind in KINDS if kind != "memory"])
def shared_place(request: pytest.FixtureRequest) -> Place:
    """One that other processes reach too."""
    return make_place(request.param, request)


def mesh(count: int = 8) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("x",)), PartitionSpec("x"))


def tree(value: float = 1.0) -> dict[str, Any]:
    """A large leaf that is sharded, small ones of several kinds, and a Python value."""
    return {
        "large": jax.device_put(jnp.full((4096, 2048), value, jnp.float32), mesh()),
        "small": [jnp.arange(5) * value, np.arange(3, dtype=np.int8)],
        "a.b": jnp.zeros((0, 3)),
        "a": {"b": jnp.asarray(value, jnp.bfloat16)},
        "key": jax.random.key(int(value)),
        "step": int(value),
    }


def assert_same(found: Any, expected: Any) -> None:
    def same(one: Any, other: Any) -> None:
        if isinstance(other, jax.Array) and jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if isinstance(other, jax.Array | np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        else:
            assert one == other

    jax.tree.map(same, found, expected)


# --- the same answers, word for word


def said(call: Callable[[], Any], place: Place) -> str:
    """How a call ended, as one line that does not tell where."""
    try:
        text = repr(call())
    except jaxckpt.CheckpointError as error:
        text = f"{type(error).__name__}: {error}"
    text = text.replace(place.root, "ROOT")
    return re.sub(r"[0-9a-f]{32}", "ID", re.sub(r"within the grace|\d+ seconds ago", "...", text))


def scenario(place: Place) -> Iterator[str]:
    """What a user may do, and what each call says."""
    path, options = place.at("run/a"), place.options()
    small = {"w": np.arange(6.0), "n": 3}
    yield said(lambda: jaxckpt.restore(path, **options), place)
    yield said(lambda: jaxckpt.delete(path, **options), place)
    yield said(lambda: jaxckpt.verify(path, **options), place)
    yield said(lambda: jaxckpt.gc(place.at("run"), **options), place)
    yield said(lambda: jaxckpt.save(path, {"f": open}, **options), place)  # type: ignore[dict-item]
    yield said(lambda: jaxckpt.save(path, small, **options).nbytes, place)
    yield said(lambda: jaxckpt.save(path, small, **options), place)
    yield said(lambda: jaxckpt.restore(path, **options), place)
    yield said(lambda: jaxckpt.restore(path, {"w": np.zeros(5), "n": 3}, **options), place)
    yield said(lambda: jaxckpt.save(path, {"w": np.arange(7.0)}, overwrite=True, **options).nbytes, place)
    yield said(lambda: jaxckpt.restore(path, **options), place)
    yield said(lambda: sorted(re.sub("index.*", "index", name) for name in place.files("run/a")), place)
    yield said(lambda: jaxckpt.verify(path, **options).ok, place)
    yield said(lambda: jaxckpt.gc(place.at("run"), grace_seconds=0, **options), place)
    place.write("run/a/mine.txt", b"mine")
    yield said(lambda: jaxckpt.save(path, small, overwrite=True, **options), place)
    yield said(lambda: jaxckpt.delete(path, **options), place)
    yield said(lambda: sorted(place.files("run")), place)
    yield said(lambda: jaxckpt.restore(path, **options), place)
    orphan = f"run/b/d-{uuid.uuid4().hex}/packs/0-0/c.0"
    place.write(orphan, b"12345")
    yield said(lambda: jaxckpt.gc(place.at("run"), **options), place)
    yield said(lambda: jaxckpt.gc(place.at("run"), grace_seconds=0, dry_run=True, **options), place)
    yield said(lambda: jaxckpt.gc(place.at("run"), grace_seconds=0, **options), place)
    yield said(lambda: sorted(place.files("run")), place)
    place.write("run/c/manifest.json", b"{}")
    yield said(lambda: jaxckpt.restore(place.at("run/c"), **options), place)
    yield said(lambda: jaxckpt.verify(place.at("run/c"), **options).faults, place)
    yield said(lambda: jaxckpt.describe(place.at("run/c"), **options), place)
    place.write("run/plain/x.txt", b"x")
    yield said(lambda: jaxckpt.save(place.at("run/plain"), small, **options), place)
    yield said(lambda: asyncio.run(jaxckpt.async_serialize([np.ones(2)], [place.at("arrays/w")], **options)), place)
    yield said(lambda: asyncio.run(jaxckpt.async_serialize([np.ones(2)], [place.at("arrays/w")], **options)), place)
    yield said(lambda: asyncio.run(jaxckpt.async_deserialize([place.at("arrays/w")], [np.zeros(2)], **options)), place)
    yield said(lambda: asyncio.run(jaxckpt.async_deserialize([place.at("arrays/v")], [np.zeros(2)], **options)), place)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_storage_says_what_a_local_disk_says_word_for_word(kind: str, request: pytest.FixtureRequest) -> None:
    expected = list(scenario(make_place("local", request)))
    assert list(scenario(make_place(kind, request))) == expected
    assert any("CheckpointExistsError" in line for line in expected)


# --- the promises


def test_what_was_saved_is_restored_onto_any_sharding(place: Place) -> None:
    info = jaxckpt.save(place.at("a"), tree(), metadata={"run": "one"}, local_data={"position": 7}, **place.options())
    assert_same(jaxckpt.restore(place.at("a"), **place.options()), tree())
    like = tree() | {"large": jax.ShapeDtypeStruct((4096, 2048), jnp.float32, sharding=mesh(2))}
    again = jaxckpt.restore(place.at("a"), like, **place.options())
    assert_same(again, tree())
    assert len(again["large"].sharding.device_set) == 2
    described = jaxckpt.describe(place.at("a"), **place.options())
    assert described == info
    assert (described.metadata, described.local_data) == ({"run": "one"}, [{"position": 7}])


def test_arrays_are_serialized_and_come_back(place: Place) -> None:
    arrays = [tree(3.0)["large"], jnp.arange(10, dtype=jnp.int4), np.arange(4.0)]
    paths = [place.at(f"arrays/{number}") for number in range(3)]
    asyncio.run(jaxckpt.async_serialize(arrays, paths, **place.options()))
    asyncio.run(jaxckpt.async_serialize(arrays[2:], paths[2:], overwrite=True, **place.options()))
    assert_same(asyncio.run(jaxckpt.async_deserialize(paths, arrays, **place.options())), arrays)


NAMES = ["", ".", "..", "../../x", "/etc", "a//b", "con", "zarr.json", "c.0", "A", "a", "é", "e\u0301", "🙂", "n" * 300]


def test_any_key_round_trips_and_nothing_lies_outside(place: Place) -> None:
    named = {name: np.full(2, number) for number, name in enumerate(NAMES)}
    jaxckpt.save(place.at("x/a"), named, options=jaxckpt.SaveOptions(pack_below_bytes=0), **place.options())
    assert_same(jaxckpt.restore(place.at("x/a"), **place.options()), named)
    assert all(name.startswith("x/a/") for name in place.files())


def damages(data: bytes) -> dict[str, bytes | None]:
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    return {"flipped": bytes(flipped), "cut": data[:-1], "emptied": b"", "longer": data + b"0", "gone": None}


def test_every_damage_to_any_file_is_an_error_that_names_it(place: Place) -> None:
    saved = {"large": np.arange(3 << 20, dtype=np.int32), "small": np.arange(5)}
    jaxckpt.save(place.at("a"), saved, **place.options())
    files = place.files("a")
    assert len(files) == 6
    for name, data in files.items():
        for damage, bad in damages(data).items():
            if bad is None:
                place.location.child("a").unlink(name)
            else:
                place.write(f"a/{name}", bad)
            what = f"{name} {damage}"
            if name == "manifest.json" and bad is None:
                with pytest.raises(jaxckpt.CheckpointNotFoundError):
                    jaxckpt.verify(place.at("a"), **place.options())
            else:
                report = jaxckpt.verify(place.at("a"), **place.options())
                assert not report.ok, what
                assert any(name in fault.problem or name in fault.file for fault in report.faults), what
            if not name.endswith("zarr.json"):  # which a restore does not read
                with pytest.raises((jaxckpt.CorruptCheckpointError, jaxckpt.CheckpointNotFoundError)) as raised:
                    jaxckpt.restore(place.at("a"), **place.options())
                assert name in str(raised.value), what
            place.write(f"a/{name}", data)
    assert jaxckpt.verify(place.at("a"), **place.options()).ok


def test_of_writers_at_once_one_wins_and_the_others_say_so(place: Place) -> None:
    for number in range(5):
        path, outcomes = place.at(f"race{number}"), []

        def write(value: int, path: str = path, outcomes: list[Any] = outcomes) -> None:
            try:
                jaxckpt.save(path, {"w": np.full(1000, value), "v": value}, **place.options())
                outcomes.append(value)
            except jaxckpt.CheckpointExistsError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=write, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert len(winners) == 1, outcomes
        found = jaxckpt.restore(path, **place.options())
        assert found["v"] == winners[0]
        assert (found["w"] == winners[0]).all()
        assert len({name.split("/")[0] for name in place.files(f"race{number}")}) == 2  # nothing of the losers


def test_a_reader_sees_old_or_new_while_checkpoints_are_overwritten(place: Place) -> None:
    path = place.at("a")

    def save(value: int) -> None:
        values = {"w": np.full(200_000, value), "v": value}
        options = jaxckpt.SaveOptions(pack_below_bytes=0)
        jaxckpt.save(path, values, overwrite=True, options=options, **place.options())

    save(0)
    writer = threading.Thread(target=lambda: [save(value) for value in range(1, 8)])
    writer.start()
    seen = []
    while writer.is_alive() or not seen:
        found = jaxckpt.restore(path, **place.options())
        assert (found["w"] == found["v"]).all()
        seen.append(found["v"])
    writer.join()
    assert seen == sorted(seen)
    assert jaxckpt.restore(path, **place.options())["v"] == 7


def test_a_training_run_keeps_resumes_and_deletes_its_steps(place: Place) -> None:
    with jaxckpt.Checkpointer(place.at("run"), keep_last=2, **place.options()) as ckpt:
        for step in range(5):
            ckpt.save(step, {"w": jnp.full(10, step)}, metrics={"loss": 1 / (step + 1)})
    again = jaxckpt.Checkpointer(place.at("run"), **place.options())
    assert again.steps() == [3, 4]
    assert (again.restore()["w"] == 4).all()
    name = next(name for name in place.files("run/4") if name.endswith("c.0"))
    place.write(f"run/4/{name}", b"damaged")
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint: step 4"):
        assert (again.restore()["w"] == 3).all()
    assert {name.split("/")[0] for name in place.files("run")} == {"3", "4"}


def settled(place: Place, name: str) -> dict[str, bytes]:
    """The files there, once the store has taken what a killed client had on its way."""
    while (found := place.files(name)) != (time.sleep(1), place.files(name))[1]:
        pass
    return found


def test_what_a_killed_save_left_is_invisible_and_gc_removes_it(shared_place: Place, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import json, os, sys, numpy as np, jaxckpt\n"
        "path, options = sys.argv[1], json.loads(sys.argv[2])\n"
        "tree = {str(n): np.full(1 << 20, n) for n in range(40)}\n"
        "def stop(done, total):\n"
        "    if done > total / 2: os.kill(os.getpid(), 9)\n"
        "jaxckpt.save(path, tree, storage_options=options or None, on_progress=stop)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), shared_place.at("a"), json.dumps(shared_place.storage_options)],
        env=os.environ | shared_place.environment,
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(jaxckpt.CheckpointNotFoundError):
        jaxckpt.restore(shared_place.at("a"), **shared_place.options())
    left = settled(shared_place, "a")
    assert left
    kept = jaxckpt.gc(shared_place.root, **shared_place.options())
    assert (len(kept.removed), len(kept.kept)) == (0, 1)
    removed = jaxckpt.gc(shared_place.root, grace_seconds=0, **shared_place.options())
    assert removed.nbytes == sum(map(len, left.values()))
    assert shared_place.files("a") == {}
    jaxckpt.save(shared_place.at("a"), {"w": np.ones(3)}, **shared_place.options())


def test_gc_leaves_alone_what_this_process_is_writing(place: Place) -> None:
    reports = []

    def collect(done: int, total: int) -> None:
        reports.append(jaxckpt.gc(place.root, grace_seconds=0, **place.options()))

    jaxckpt.save(place.at("a"), tree(), on_progress=collect, **place.options())
    assert reports
    assert not any(report.removed for report in reports)
    assert any("a save is writing it" in reason for report in reports for _, reason in report.kept)
    assert jaxckpt.verify(place.at("a"), **place.options()).ok


def test_a_save_that_fails_leaves_nothing(place: Place) -> None:
    def fail(done: int, total: int) -> None:
        if done > total / 2:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        jaxckpt.save(place.at("a"), tree(), on_progress=fail, **place.options())
    assert place.files() == {}


def test_an_interrupted_save_of_an_async_program_leaves_nothing(place: Place) -> None:
    async def main() -> None:
        saving = asyncio.create_task(jaxckpt.save_async(place.at("a"), tree(), **place.options()))
        await asyncio.sleep(0.02)
        saving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await saving

    asyncio.run(main())
    if place.location.child("a").is_file("manifest.json"):  # it was quicker
        assert jaxckpt.verify(place.at("a"), **place.options()).ok
    else:
        assert place.files() == {}


# --- copies


@pytest.mark.parametrize("to", KINDS)
def test_a_checkpoint_is_copied_between_any_two_storages(place: Place, to: str, request: pytest.FixtureRequest) -> None:
    dest = make_place(to, request)
    copying = {"storage_options": place.storage_options or None, "dest_storage_options": dest.storage_options or None}
    jaxckpt.save(place.at("a"), tree(), **place.options())
    told: list[tuple[int, int]] = []
    info = jaxckpt.copy(place.at("a"), dest.at("b"), on_progress=lambda *said: told.append(said), **copying)
    assert (info.path, info.nbytes) == (dest.at("b"), jaxckpt.describe(place.at("a"), **place.options()).nbytes)
    assert told[-1][0] == told[-1][1] > info.nbytes
    assert dest.files("b") == place.files("a")
    assert_same(jaxckpt.restore(dest.at("b"), **dest.options()), tree())
    jaxckpt.copy(place.at("a"), dest.at("b"), **copying)  # nothing is left to do


def test_a_copy_that_was_broken_off_goes_on_where_it_was(place: Place, tmp_path: Path) -> None:
    saved = {str(number): np.full(200_000, number) for number in range(20)}
    jaxckpt.save(tmp_path / "a", saved, options=jaxckpt.SaveOptions(pack_below_bytes=0))
    calls = 0

    def fail(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        jaxckpt.copy(tmp_path / "a", place.at("b"), dest_storage_options=place.storage_options, on_progress=fail)
    left = place.files("b")
    assert left
    assert "manifest.json" not in left
    damaged = min(left)
    place.write(f"b/{damaged}", left[damaged][:-1] + b"?")
    before = {name: stat.modified for name, stat in place.location.child("b").files().items()}
    time.sleep(1.1)  # stores tell the time in seconds
    jaxckpt.copy(tmp_path / "a", place.at("b"), dest_storage_options=place.storage_options)
    after = {name: stat.modified for name, stat in place.location.child("b").files().items()}
    if place.kind != "memory":  # which tells no times
        assert {name for name in before if after[name] != before[name]} == {damaged}
    assert jaxckpt.verify(place.at("b"), **place.options()).ok


def test_a_damaged_checkpoint_is_not_copied(place: Place, tmp_path: Path) -> None:
    jaxckpt.save(place.at("a"), tree(), **place.options())
    name = next(name for name in place.files("a") if "packs" in name and name.endswith("c.0"))
    data = bytearray(place.files("a")[name])
    data[0] ^= 1
    place.write(f"a/{name}", bytes(data))
    with pytest.raises(jaxckpt.CorruptCheckpointError, match=f"{name}: .* do not match their hash"):
        jaxckpt.copy(place.at("a"), tmp_path / "b", storage_options=place.storage_options)
    with pytest.raises(jaxckpt.CheckpointNotFoundError):
        jaxckpt.describe(tmp_path / "b")


def test_a_copy_replaces_only_when_asked(place: Place, tmp_path: Path) -> None:
    jaxckpt.save(place.at("a"), {"v": 1}, **place.options())
    jaxckpt.save(tmp_path / "b", {"v": 2})
    with pytest.raises(jaxckpt.CheckpointExistsError, match=r"overwrite=True \(--overwrite\) replaces it"):
        jaxckpt.copy(place.at("a"), tmp_path / "b", storage_options=place.storage_options)
    jaxckpt.copy(place.at("a"), tmp_path / "b", overwrite=True, storage_options=place.storage_options)
    assert jaxckpt.restore(tmp_path / "b") == {"v": 1}


# --- the command line, which takes all from the environment


def test_every_command_takes_urls(shared_place: Place, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", w=np.arange(10.0))

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "jaxckpt", *arguments],
            env=os.environ | shared_place.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("save", str(tmp_path / "in.npz"), shared_place.at("a"), "--verify-after-save")
    assert "w" in run("ls", shared_place.at("a"))
    assert "verified" in run("verify", shared_place.at("a"))
    assert "copied" in run("copy", shared_place.at("a"), shared_place.at("b"))
    run("restore", shared_place.at("b"), str(tmp_path / "out.npz"))
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["w"], np.arange(10.0))
    run("delete", shared_place.at("a"))
    assert "removed 0 leftovers" in run("gc", shared_place.root, "--grace-seconds", "0")
    assert {name.split("/")[0] for name in shared_place.files()} == {"b"}


# --- many processes


def save_together(index: int, url: str, environment: dict[str, str], options: dict[str, Any]) -> Any:
    os.environ.update(environment)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    array = jax.make_array_from_callback((8, 1 << 18), sharding, lambda at: np.arange(8 << 18).reshape(8, -1)[at])
    try:
        jaxckpt.save(url, {"w": array, "n": 5}, storage_options=options or None)
    except jaxckpt.CheckpointError as error:
        return str(error)
    found = jaxckpt.restore(url, {"w": sharding, "n": 5}, storage_options=options or None)
    return bool((found["w"] == array).all())


def test_the_processes_of_a_program_save_and_restore_together(shared_place: Place) -> None:
    arguments = shared_place.at("a"), shared_place.environment, shared_place.storage_options
    assert cluster.run(2, save_together, *arguments) == [True, True]
    found = jaxckpt.restore(shared_place.at("a"), **shared_place.options())
    np.testing.assert_array_equal(found["w"], np.arange(8 << 18).reshape(8, -1))
    assert {"index-0.json", "index-1.json"} <= {name.split("/")[1] for name in shared_place.files("a") if "/" in name}


def test_the_memory_of_one_process_is_refused_to_a_program_of_several() -> None:
    first, second = cluster.run(2, save_together, "memory://tests/together", {}, {})
    assert "process 1 has written index-1.json there, which process 0 does not see" in first
    assert "process 0 failed, so nothing was saved" in second


# --- URLs and options


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "is not a path"),
        ("s3:///a", "expected a bucket"),
        ("s3://bucket/a/../b", "without empty ones, '.' or '..' among them"),
        ("gs://bucket//a", "without empty ones"),
        ("s3:/bucket/a", "a Path makes s3:/ of s3://; pass the URL as a str"),
        ("ftp://host/a", "'ftp' is not supported; expected a local path, file://, s3://, gs://, memory://"),
    ],
)
def test_what_is_no_url_of_a_storage_is_refused(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        jaxckpt.save(url, {"v": 1})


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("s3://bucket/a", {"password": "x"}, "s3:// has no storage option 'password'; expected key, secret"),
        ("memory://bucket/a", {"key": "x"}, "memory:// has no storage option 'key'; expected none"),
        ("/tmp/nowhere", {"key": "x"}, "/tmp/nowhere is on a local disk, which has no storage options (key)"),
        ("s3://bucket/a", {"key": "x"}, "storage_options has a key or a secret without the other"),
        ("s3://bucket/a", {"retry_seconds": 0}, "retry_seconds is 0; expected more than 0 seconds"),
        ("s3://bucket/a", {"anon": "yes"}, "anon is 'yes'; expected True or False"),
    ],
)
def test_an_option_that_a_storage_does_not_know_is_refused(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        jaxckpt.restore(url, storage_options=options)


def test_memory_mapping_an_object_is_refused_with_words(seaweed: stores.SeaweedFS) -> None:
    url = seaweed.url(uuid.uuid4().hex)
    jaxckpt.save(url, {"w": np.arange(5.0)}, storage_options=seaweed.storage_options)
    with pytest.raises(jaxckpt.StorageError, match="memory_map maps files of a local disk; restore this without it"):
        jaxckpt.restore(url, options=jaxckpt.RestoreOptions(memory_map=True), storage_options=seaweed.storage_options)


def test_the_package_that_is_missing_is_named(seaweed: stores.SeaweedFS, run_script: RunScript) -> None:
    done = run_script(
        """
        import sys, jaxckpt
        sys.modules["s3fs"] = None
        jaxckpt.save(sys.argv[1], {"v": 1}, storage_options={"endpoint_url": sys.argv[2], "anon": True})
        """,
        *(seaweed.url("a"), seaweed.endpoint),
    )
    assert "StorageError: [Errno 65] s3:// needs another package; run: pip install 'jaxckpt[s3]'" in done.stderr
