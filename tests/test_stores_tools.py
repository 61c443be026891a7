"""The servers, the shim and the fault proxy that the tests of object stores stand on do what they say."""

import hashlib
import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import proxy
import pytest
import stores
import tensorstore as ts
from proxy import Fault, FaultProxy
from stores import SeaweedFS, Store

VALUE = b"0123456789" * 1000
MISSING = b"\x02"  # the generation of a key that is not there
CHUNK = 1 << 18  # gcsfs uploads what is larger in several requests
RETRIES = {"max_retries": 0, "initial_delay": "10ms", "max_delay": "50ms"}

needs = {
    name: pytest.mark.skipif(bool(stores.missing(name)), reason=stores.missing(name) or "") for name in stores.PROGRAMS
}


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with stores.seaweedfs(tmp_path_factory.mktemp("stores")) as store:
        yield store


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with stores.fake_gcs(tmp_path_factory.mktemp("stores")) as store:
        yield store


@pytest.fixture(
    params=[pytest.param("seaweedfs", marks=needs["weed"]), pytest.param("gcs", marks=needs["fake-gcs-server"])]
)
def store(request: pytest.FixtureRequest) -> Store:
    return request.getfixturevalue(request.param)


@pytest.fixture
def faults(store: Store) -> Iterator[FaultProxy]:
    with FaultProxy(store.endpoint) as opened:
        yield opened


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Opens a store with TensorStore, one request a call."""

    def opened(store: Store, path: str) -> Any:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        if store.scheme == "gs":
            spec = {"driver": "gcs", "gcs_request_retries": RETRIES}
        else:
            credentials = {"type": "environment"}
            spec = {"driver": "s3", "aws_region": stores.REGION, "s3_request_retries": RETRIES}
            spec |= {"endpoint": store.endpoint, "aws_credentials": credentials}
        return ts.KvStore.open(spec | {"bucket": store.bucket, "path": path}, context=ts.Context()).result()

    return opened


def _s3fs(store: Store) -> Any:
    s3fs = pytest.importorskip("s3fs")
    options = {"config_kwargs": {"retries": {"max_attempts": 1}}, "use_listings_cache": False}
    region = {"region_name": stores.REGION}
    fs = s3fs.S3FileSystem(
        key=store.key,
        secret=store.secret,
        endpoint_url=store.endpoint,
        client_kwargs=region,
        skip_instance_cache=True,
        **options,
    )
    fs.retries = 1
    return fs


def _gcsfs(store: Store) -> Any:
    core = pytest.importorskip("gcsfs.core")
    return core.GCSFileSystem(
        project="p", token="anon", endpoint_url=store.endpoint, skip_instance_cache=True, use_listings_cache=False
    )


def _put(store: Store, name: str) -> tuple[int, bytes]:
    """An upload without signature, which a store of S3 refuses unless it never gets there."""
    if store.scheme == "gs":
        path = f"/upload/storage/v1/b/{store.bucket}/o?uploadType=media&name={name}"
        return stores.request(store.port, "POST", path, VALUE)
    return stores.request(store.port, "PUT", f"/{store.bucket}/{name}", VALUE)


class TestFaults:
    @pytest.mark.parametrize("status", proxy.ERRORS)
    def test_an_error_is_answered_in_the_stores_place(self, store: Store, faults: FaultProxy, status: str) -> None:
        faults.inject(Fault(status, "put", "^a/x$"))
        answer, body = _put(store.behind(faults.endpoint), "a/x")
        assert answer == int(status)
        assert (b"<Error><Code>" in body) if store.scheme == "s3" else (b'{"error": {"code": %d' % answer in body)
        assert faults.injected == 1
        assert [seen.status for seen in faults.requests] == [answer]

    def test_a_429_says_when_to_come_back(self, store: Store, faults: FaultProxy) -> None:
        faults.inject(Fault("429"))
        connection = http.client.HTTPConnection(faults.endpoint.removeprefix("http://"))
        connection.request("HEAD", "/")
        assert connection.getresponse().getheader("retry-after") == "1"
        connection.close()

    @pytest.mark.parametrize("status", ["503", "429", "500", "403"])
    @pytest.mark.parametrize("verb", ["put", "get", "list", "delete"])
    def test_tensorstore_sees_each_error(
        self, store: Store, faults: FaultProxy, opened: Callable[..., Any], verb: str, status: str
    ) -> None:
        kv = opened(store.behind(faults.endpoint), "errors/")
        faults.inject(Fault(status, verb, "errors/"))
        calls = {"put": lambda: kv.write("k", b"1"), "get": lambda: kv.read("k"), "list": kv.list}
        calls["delete"] = lambda: kv.write("k", None)
        if (store.scheme, verb, status) == ("gs", "list", "403"):
            calls[verb]().result()  # an empty list, and no error, in TensorStore 0.1.86
        else:
            with pytest.raises(ValueError, match=f"http_response_code='{status}'"):
                calls[verb]().result()
        assert faults.injected == 1
        assert int(status) in [seen.status for seen in faults.requests]
        calls[verb]().result()

    @pytest.mark.parametrize(("kind", "stored"), [("reset", False), ("half_body", False), ("lost_answer", True)])
    def test_a_put_that_is_cut_off_was_applied_or_not(
        self, store: Store, faults: FaultProxy, opened: Callable[..., Any], kind: str, stored: bool
    ) -> None:
        kv = opened(store.behind(faults.endpoint), f"{kind}/")
        faults.inject(Fault(kind, "put", times=None))
        with pytest.raises(ValueError, match="CURL error"):
            kv.write("k", VALUE).result()
        assert faults.injected >= 1
        assert {seen.status for seen in faults.requests} == {None}
        assert opened(store, f"{kind}/").read("k").result().value == (VALUE if stored else b"")

    def test_a_lost_answer_makes_the_winner_look_like_the_loser(
        self, store: Store, faults: FaultProxy, opened: Callable[..., Any]
    ) -> None:
        kv = opened(store.behind(faults.endpoint), "lost/")
        kv.write("warm", b"").result()
        faults.inject(Fault("lost_answer", "put", "lost/k"))
        assert kv.write("k", b"mine", if_equal=MISSING).result().generation == b""
        assert kv.read("k").result().value == b"mine"

    def test_a_truncated_answer_is_an_error(self, store: Store, faults: FaultProxy, opened: Callable[..., Any]) -> None:
        kv = opened(store.behind(faults.endpoint), "truncated/")
        kv.write("k", VALUE).result()
        faults.inject(Fault("truncated", "get"))
        with pytest.raises(ValueError, match=f"{len(VALUE) // 2} bytes missing"):
            kv.read("k").result()
        assert faults.injected == 1

    @pytest.mark.parametrize("kind", ["flip_out", "flip_in"])
    def test_one_bit_flips(self, store: Store, faults: FaultProxy, opened: Callable[..., Any], kind: str) -> None:
        kv = opened(store.behind(faults.endpoint), f"{kind}/")
        faults.inject(Fault(kind, "put" if kind == "flip_out" else "get", "/k$"))
        kv.write("k", VALUE).result()
        read = kv.read("k").result().value
        assert sum((a ^ b).bit_count() for a, b in zip(read, VALUE, strict=True)) == 1
        assert (kv.read("k").result().value == VALUE) == (kind == "flip_in")
        assert faults.injected == 1

    def test_slow_and_hanging_answers(self, store: Store, faults: FaultProxy, opened: Callable[..., Any]) -> None:
        kv = opened(store.behind(faults.endpoint), "slow/")
        faults.inject(Fault("slow", "put", seconds=0.3))
        start = time.monotonic()
        kv.write("k", VALUE).result()
        assert time.monotonic() - start >= 0.3
        faults.inject(Fault("hang", "get"))
        with pytest.raises(TimeoutError):
            kv.read("k").result(timeout=0.5)
        assert faults.injected == 2
        assert faults.requests[-1].status is None

    def test_after_and_times_choose_the_requests(
        self, store: Store, faults: FaultProxy, opened: Callable[..., Any]
    ) -> None:
        kv = opened(store.behind(faults.endpoint), "chosen/")
        faults.inject(Fault("503", "put", "/b$", times=2, after=1))
        kept: list[bool] = []
        for key in "babbb":
            try:
                kv.write(key, b"").result()
                kept.append(True)
            except ValueError:
                kept.append(False)
        assert kept == [True, True, False, False, True]
        assert faults.count("put") == 5
        assert faults.count("put", "/b$") == 4
        faults.clear()
        assert (faults.injected, faults.requests) == (0, [])

    def test_a_fault_without_a_place_waits_for_one(
        self, store: Store, faults: FaultProxy, opened: Callable[..., Any]
    ) -> None:
        kv = opened(store.behind(faults.endpoint), "place/")
        faults.inject(Fault("flip_in", "get"))
        assert kv.read("missing").result().state == "missing"
        assert faults.injected == 0
        kv.write("k", VALUE).result()
        assert kv.read("k").result().value != VALUE
        assert faults.injected == 1


class TestProxy:
    def test_large_objects_pass_whole_and_many_at_once(
        self, store: Store, faults: FaultProxy, opened: Callable[..., Any]
    ) -> None:
        kv = opened(store.behind(faults.endpoint), "large/")
        values = {"big": os.urandom(64 << 20)} | {str(i): os.urandom(100_000 + i) for i in range(32)}
        start = time.monotonic()
        for written in [kv.write(key, value) for key, value in values.items()]:
            written.result()
        reads = {key: kv.read(key) for key in values}
        assert all(read.result().value == values[key] for key, read in reads.items())
        assert time.monotonic() - start < 20
        assert sorted(kv.list().result()) == sorted(key.encode() for key in values)
        assert faults.count("list") == 1

    def test_a_client_that_waits_for_100_continue_or_sends_chunks(self, store: Store, faults: FaultProxy) -> None:
        if store.scheme == "s3":
            pytest.skip("an upload without a signature needs GCS")
        connection = http.client.HTTPConnection(faults.endpoint.removeprefix("http://"), timeout=5)
        path = f"/upload/storage/v1/b/{store.bucket}/o?uploadType=media&name=raw"
        for headers, body in [({"Expect": "100-continue"}, VALUE), ({}, iter([VALUE, VALUE]))]:
            connection.request("POST", path, body, headers, encode_chunked=True)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
        connection.request("GET", f"/storage/v1/b/{store.bucket}/o/raw?alt=media")
        assert connection.getresponse().read() == VALUE * 2
        connection.close()
        assert [seen.verb for seen in faults.requests] == ["put", "put", "get"]

    @needs["weed"]
    def test_signatures_of_s3fs_stay_valid_and_its_verbs_are_known(self, seaweedfs: SeaweedFS) -> None:
        with FaultProxy(seaweedfs.endpoint) as faults:
            fs = _s3fs(seaweedfs.behind(faults.endpoint))
            root = f"{seaweedfs.bucket}/s3fs"
            fs.pipe_file(f"{root}/a b+c", VALUE)
            fs.cp_file(f"{root}/a b+c", f"{root}/copy")
            assert fs.cat_file(f"{root}/copy", start=3, end=6) == VALUE[3:6]
            assert fs.find(root) == [f"{root}/a b+c", f"{root}/copy"]
            fs.rm(root, recursive=True)
            seen = [(request.verb, request.key) for request in faults.requests]
        assert ("put", "s3fs/a b+c") in seen
        assert ("put", "s3fs/copy") in seen
        assert ("head", "s3fs/a b+c") in seen
        assert ("get", "s3fs/copy") in seen
        assert ("list", "s3fs/") in seen
        assert "s3fs/a b+c" in next(key for verb, key in seen if verb == "delete").split("\n")

    @needs["weed"]
    def test_s3fs_notices_bits_that_flip(self, seaweedfs: SeaweedFS) -> None:
        with FaultProxy(seaweedfs.endpoint) as faults:
            fs = _s3fs(seaweedfs.behind(faults.endpoint))
            fs.pipe_file(f"{seaweedfs.bucket}/flips", VALUE)
            for kind, verb in [("flip_in", "get"), ("flip_out", "put")]:
                faults.inject(Fault(kind, verb, times=None))
                call = {"get": fs.cat_file, "put": lambda path: fs.pipe_file(path, VALUE)}[verb]
                with pytest.raises(Exception, match="(?i)checksum|digest|did not match"):
                    call(f"{seaweedfs.bucket}/flips")
                assert faults.injected >= 1
                faults.clear()

    @needs["fake-gcs-server"]
    def test_gcsfs_verbs_are_known_and_its_uploads_go_through(self, gcs: Store) -> None:
        with FaultProxy(gcs.endpoint) as faults:
            fs = _gcsfs(gcs.behind(faults.endpoint))
            root = f"{gcs.bucket}/gcsfs"
            faults.inject(Fault("flip_out", "put", "gcsfs/a"))
            fs.pipe_file(f"{root}/a", VALUE)
            assert sum((a ^ b).bit_count() for a, b in zip(fs.cat_file(f"{root}/a"), VALUE, strict=True)) == 1
            fs.pipe_file(f"{root}/big", VALUE * 100, chunksize=CHUNK)
            fs.cp_file(f"{root}/a", f"{root}/copy")
            assert fs.find(root) == [f"{root}/{name}" for name in ("a", "big", "copy")]
            assert fs.cat_file(f"{root}/big") == VALUE * 100
            fs.rm([f"{root}/a", f"{root}/copy"])
            seen = [(request.verb, request.key) for request in faults.requests]
            assert faults.injected == 1
            sent = sum(request.path.startswith("/upload/") for request in faults.requests)
        assert sent == 6
        assert seen[0] == ("put", "gcsfs/a")
        assert ("put", "gcsfs/copy") in seen
        assert ("get", "gcsfs/big") in seen
        deleted = [key for verb, keys in seen if verb == "delete" for key in keys.split("\n")]
        assert sorted(deleted) == ["gcsfs/a", "gcsfs/copy"]


class TestStores:
    def test_a_second_create_only_write_is_refused(self, store: Store, opened: Callable[..., Any]) -> None:
        kv = opened(store, "create/")
        assert kv.write("k", b"first", if_equal=MISSING).result().generation != b""
        assert kv.write("k", b"second", if_equal=MISSING).result().generation == b""
        generation = kv.read("k").result().stamp.generation
        assert kv.write("k", b"third", if_equal=generation).result().generation != b""
        assert kv.write("k", b"fourth", if_equal=generation).result().generation == b""
        assert kv.write("k", None, if_equal=generation).result().generation == b""
        assert kv.read("k").result().value == b"third"
        assert kv.read("k", if_not_equal=kv.read("k").result().stamp.generation).result().state == "unspecified"

    def test_one_of_many_creates_wins(self, store: Store, opened: Callable[..., Any]) -> None:
        kv = opened(store, "race/")
        for round_ in range(3):
            written = [
                kv.write(f"k{round_}", b"%d" % i, if_equal=MISSING) for i in range(4)
            ]  # with 8, TensorStore stalls
            won = [i for i, future in enumerate(written) if future.result().generation != b""]
            assert len(won) == 1
            assert kv.read(f"k{round_}").result().value == b"%d" % won[0]

    @needs["fake-gcs-server"]
    @pytest.mark.parametrize("size", [10, 1 << 20], ids=["multipart", "resumable"])
    def test_the_shim_refuses_a_second_create_of_gcsfs(self, gcs: Store, size: int) -> None:
        fs, path = _gcsfs(gcs), f"{gcs.bucket}/create-{size}"
        fs.pipe_file(path, b"1" * size, mode="create", chunksize=CHUNK)
        with pytest.raises(FileExistsError):
            fs.pipe_file(path, b"2" * size, mode="create", chunksize=CHUNK)
        assert fs.cat_file(path) == b"1" * size
        fs.pipe_file(path, b"3" * size, chunksize=CHUNK)
        assert fs.cat_file(path) == b"3" * size

    @needs["weed"]
    def test_seaweedfs_keeps_what_it_acknowledged_when_it_is_killed(
        self, tmp_path: Path, opened: Callable[..., Any]
    ) -> None:
        with stores.seaweedfs(tmp_path) as store:
            kv, kept = opened(store, "kept/"), {}
            stop = threading.Timer(0.5, store.kill)
            stop.start()
            while True:
                key = str(len(kept))
                try:
                    kv.write(key, hashlib.sha256(key.encode()).digest() * 100).result()
                except ValueError:
                    break
                kept[key] = hashlib.sha256(key.encode()).digest() * 100
            stop.join()
            store.restart()
            assert len(kept) > 10
            kv = opened(store, "kept/")
            assert all(kv.read(key).result().value == value for key, value in kept.items())

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=needs[program]) for name, (_, program) in stores.BAD.items()]
    )
    def test_a_bad_store_ignores_preconditions(self, tmp_path: Path, name: str, opened: Callable[..., Any]) -> None:
        start, _ = stores.BAD[name]
        with start(tmp_path) as store:
            kv = opened(store, "bad/")
            kv.write("k", b"first", if_equal=MISSING).result()
            assert kv.read("k").result().value == b"first"
            created = kv.write("k", b"second", if_equal=MISSING).result().generation
            # localbucket is a half store: it knows If-None-Match.
            assert (created == b"") == (name == "localbucket")
            old = kv.read("k").result().stamp.generation
            kv.write("k", b"third").result()
            assert kv.write("k", b"fourth", if_equal=old).result().generation != b""
            assert kv.read("k").result().value == b"fourth"

    @needs["fake-gcs-server"]
    def test_servers_end_with_the_process_that_started_them(self, tmp_path: Path) -> None:
        script = "import os, pathlib, stores\nwith stores.bare_gcs(pathlib.Path(os.environ['HERE'])) as store:\n"
        script += "    print(store.port, flush=True)\n    os.kill(os.getpid(), 9)\n"
        environment = os.environ | {"HERE": str(tmp_path), "PYTHONPATH": str(Path(stores.__file__).parent)}
        out = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                stores.request(int(out.stdout), "GET", "/")
            except OSError:
                return
            time.sleep(0.05)
        pytest.fail("the server still answers")

    def test_a_server_that_cannot_start_shows_its_log(self, tmp_path: Path) -> None:
        broken = stores.Server([sys.executable, "-c", "raise SystemExit('no such disk')"], tmp_path, lambda: False)
        with (
            pytest.raises(RuntimeError, match="ended with 1; the end of its log:\nno such disk"),
            stores.running(broken),
        ):
            pass
