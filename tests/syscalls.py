"""The storage system calls of a child, each handed to the test, which lets it run, spoils it or kills the child there.

`strace -e inject=...:when=K` counts for each thread on its own: it cannot name the K-th call
of a process that writes from a pool of threads, and one-shot faults hit every thread once.
So the child filters its own calls with seccomp and the test answers its notifications: one
count over all threads, real short writes, and a child that serves run after run.

Source: seccomp_unotify(2), https://man7.org/linux/man-pages/man2/seccomp_unotify.2.html
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import pickle
import platform
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import forked

_BY_FD = {"read": 0, "pread64": 17, "readv": 19, "preadv": 295, "preadv2": 327}
_BY_FD |= {"write": 1, "close": 3, "pwrite64": 18, "writev": 20, "flock": 73, "fsync": 74, "fdatasync": 75}
_BY_FD |= {"ftruncate": 77, "getdents64": 217, "sync_file_range": 277, "fallocate": 285, "pwritev": 296}
_BY_FD |= {"syncfs": 306, "copy_file_range": 326, "pwritev2": 328}
_BY_PATH = {"open": 2, "truncate": 76, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87}
_AT = {"openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265, "renameat2": 316, "openat2": 437}
_NAMES = {number: name for name, number in (_BY_FD | _BY_PATH | _AT).items()}

_SECCOMP, _PIDFD_GETFD = 317, 438
_SET_MODE_FILTER = 1
_TSYNC, _NEW_LISTENER, _TSYNC_ESRCH = 1, 8, 16
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_CONTINUE = 1
_RECEIVE, _SEND, _ADD_FD = 0xC0502100, 0xC0182101, 0x40182103
_SET_FD = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_ADDITION = struct.Struct("=QIIII")
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)

Damage = Literal["kill", "error", "short", "lie"]


def why_not() -> str | None:
    """Why this machine cannot do it, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the system call filter is written for Linux on x86_64"
    try:
        with open("/proc/sys/kernel/seccomp/actions_avail") as actions:
            return None if "user_notif" in actions.read() else "this kernel has no seccomp user notifications"
    except OSError as error:
        return f"no seccomp: {error}"


def hand_over() -> int:
    """Stop every storage call of this process until whoever reads the returned descriptor has answered it."""
    code = [(0x20, 0, 0, 0)]  # load the call's number
    numbers = list(_NAMES)
    code += [(0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]  # one of them: to the last
    code += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(instructions))
    _libc.prctl(38, 1, 0, 0, 0)  # no new privileges, without which only root may filter
    flags = _NEW_LISTENER | _TSYNC | _TSYNC_ESRCH
    listener = _libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, ctypes.create_string_buffer(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the storage call number `at`, counted from 0 among those called `only`, if that is given.

    `after` tells what happens to those that follow: nothing, the same to all of the same
    name, or the same to all.
    """

    at: int
    damage: Damage
    errno: int = 0
    after: Literal["nothing", "same", "all"] = "nothing"
    only: frozenset[str] = frozenset()
    most: int = sys.maxsize


@dataclass(slots=True)
class Run:
    """What the supervisor has seen of one run."""

    within: str
    fault: Fault | None
    calls: list[Call] = field(default_factory=list)
    injected: list[Call] = field(default_factory=list)
    seen: int = 0

    def spoils(self, call: Call) -> bool:
        """Count a call; whether it is to be spoiled."""
        self.calls.append(call)
        fault = self.fault
        if fault is None:
            return False
        if self.injected:
            again = fault.after == "all" or (fault.after == "same" and call.name == self.injected[0].name)
            hit = again and len(self.injected) < fault.most
        elif fault.only and call.name not in fault.only:
            return False
        else:
            hit, self.seen = self.seen == fault.at, self.seen + 1
        if hit:
            self.injected.append(call)
        return hit


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of the child."""

    classes: tuple[str, ...]
    errno: int | None
    filename: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    killed: bool
    failure: Failure | None
    calls: list[Call]
    injected: list[Call]


class Child:
    """A process that runs functions of this module's sibling `syscalls_child`, one after the other, under supervision.

    Args:
        target: `syscalls_child.serve`.
        within: Calls on paths below this directory are the storage's, all others pass.
        args: More of them for `target`.
    """

    def __init__(self, target: Callable[..., None], within: str, *args: Any) -> None:
        self._within = within + "/"
        self._run: Run | None = None
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(60)
        self.process = forked.start(target, theirs, within, *args)
        theirs.close()
        self._supervisor: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        if self._supervisor is not None:
            self._supervisor.join()
        self._channel.close()

    def ready(self) -> None:
        """Wait until it has warmed up, and take its system calls over."""
        _, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
        if not descriptors:
            raise RuntimeError("the child has died before it was ready")
        self._supervisor = threading.Thread(target=self._supervise, args=(descriptors[0],), name="supervisor")
        self._supervisor.start()
        self._channel.send(b"go")

    def run(self, function: str, *args: Any, fault: Fault | None = None) -> Outcome:
        """Call a function in the child while `fault` waits for its storage calls."""
        if self._supervisor is None:
            self.ready()
        run = Run(self._within, fault)
        with self._lock:
            self._run = run
        self._channel.send(pickle.dumps((function, args)))
        reply = self._channel.recv(1 << 16)
        with self._lock:
            self._run = None
        if not reply:
            self.process.join()
        return Outcome(not reply, pickle.loads(reply) if reply else None, run.calls, run.injected)

    def _supervise(self, listener: int) -> None:
        pid = self.process.pid
        assert pid is not None
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        memory, pidfd = os.open(f"/proc/{pid}/mem", os.O_RDONLY), os.pidfd_open(pid)
        try:
            while not poll.poll()[0][1] & select.POLLHUP:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it died meanwhile
                    notification = bytearray(_NOTIFICATION.size)
                    fcntl.ioctl(listener, _RECEIVE, notification)
                    fcntl.ioctl(listener, _SEND, self._answer(listener, memory, pidfd, notification))
        finally:
            for fd in (listener, memory, pidfd):
                os.close(fd)

    def _answer(self, listener: int, memory: int, pidfd: int, notification: bytearray) -> bytes:
        id_, _, _, number, _, _, *args = _NOTIFICATION.unpack(notification)
        name = _NAMES[number]
        pass_on = _RESPONSE.pack(id_, 0, 0, _CONTINUE)
        path = self._path(memory, name, args)
        with self._lock:
            run = self._run
            if run is None or not f"{path}/".startswith(run.within) or not run.spoils(Call(name, path)):
                return pass_on
        assert run.fault is not None
        match run.fault.damage:
            case "kill":
                assert self.process.pid is not None
                os.kill(self.process.pid, signal.SIGKILL)
                return pass_on
            case "error":
                if name == "close":  # which lets go of the file whatever it returns
                    _replace_with_null(listener, id_, args[0])
                return _RESPONSE.pack(id_, 0, -run.fault.errno, 0)
            case "short":
                return _RESPONSE.pack(id_, _write_half(memory, pidfd, name, args), 0, 0)
            case "lie":
                return _RESPONSE.pack(id_, len(_written(memory, name, args)), 0, 0)

    def _path(self, memory: int, name: str, args: list[int]) -> str:
        """The (first) path that a call is about; empty where it has none."""
        directory = f"/proc/{self.process.pid}/cwd"
        if name in _BY_FD:
            return _target(f"/proc/{self.process.pid}/fd/{_signed(args[0])}")
        if name in _AT and _signed(args[0]) != _AT_FDCWD:
            directory = f"/proc/{self.process.pid}/fd/{_signed(args[0])}"
        path = _string(memory, args[1] if name in _AT else args[0])
        return path if path.startswith("/") else os.path.join(_target(directory), path)


WRITES = frozenset({"write", "writev", "pwrite64", "pwritev"})


def _signed(word: int) -> int:
    return ctypes.c_int(word & 0xFFFFFFFF).value


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _string(memory: int, address: int) -> str:
    data = b""
    while b"\0" not in data:
        at = address + len(data)
        data += os.pread(memory, 4096 - at % 4096, at)  # up to the end of its page: the next may not be there
    return os.fsdecode(data.split(b"\0", 1)[0])


def _written(memory: int, name: str, args: list[int]) -> bytes:
    """What a call is about to write."""
    if name in ("write", "pwrite64"):
        return os.pread(memory, args[2], args[1])
    vector = os.pread(memory, 16 * args[2], args[1])
    return b"".join(os.pread(memory, size, address) for address, size in struct.iter_unpack("=QQ", vector))


def _write_half(memory: int, pidfd: int, name: str, args: list[int]) -> int:
    """Write the first half in place of the child; what is written."""
    data = _written(memory, name, args)
    half = data[: max(1, len(data) // 2)]
    fd = _libc.syscall(_PIDFD_GETFD, pidfd, _signed(args[0]), 0)
    try:
        return os.write(fd, half) if name in ("write", "writev") else os.pwrite(fd, half, args[3])
    finally:
        os.close(fd)


def _replace_with_null(listener: int, id_: int, fd: int) -> None:
    with open(os.devnull, "rb") as null:
        fcntl.ioctl(listener, _ADD_FD, _ADDITION.pack(id_, _SET_FD, null.fileno(), fd, os.O_CLOEXEC))


@contextlib.contextmanager
def spares(make: Callable[[], Child], number: int) -> Generator[Callable[[], Child]]:
    """A source of children that warm up while the test is busy with the one before."""
    waiting = [make() for _ in range(number)]

    def take() -> Child:
        waiting.append(make())
        return waiting.pop(0)

    try:
        yield take
    finally:
        for child in waiting:
            child.__exit__()


ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EMFILE, errno.EINTR)
