"""Disks of a test's own: images that lose power or hang, tmpfs that fills up, mounts that cannot be written.

All of it needs root, and is undone when the block ends, however it ends.
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import struct
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

# EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are the same. 2: not even the journal reaches the disk any more.
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_IMAGE_BYTES = 320 << 20  # mkfs.xfs refuses less than 300 MB

_TOOLS = ("mount", "mkfs.ext4", "mkfs.xfs", "fsfreeze", "chattr")
_MISSING = [tool for tool in _TOOLS if shutil.which(tool) is None]

needs_disks = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/loop-control") or bool(_MISSING),
    reason=f"needs root, loop devices and {', '.join(_MISSING or _TOOLS)}",
)


class Disk:
    """A mounted image of the file system `kind`; `path` is where."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = folder / kind
        self._image = folder / f"{kind}.img"
        self._guard: subprocess.Popen[bytes] | None = None
        self.path.mkdir()
        with self._image.open("wb") as image:
            image.truncate(_IMAGE_BYTES)
        _run(f"mkfs.{kind}", "-q", self._image)

    def mount(self) -> None:
        """Mount the image. After a power cut the kernel recovers it from its journal."""
        _run("mount", "-o", "loop", self._image, self.path)

    def unmount(self) -> None:
        _run("umount", self.path)

    def cut_power(self) -> None:
        """From now on nothing reaches the disk; what had not yet, is lost."""
        root = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(root, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(root)
        with contextlib.suppress(OSError):
            (self.path / "probe").mkdir()
            raise AssertionError("the power is cut, but the disk takes writes")

    def restart(self) -> None:
        """Begin again after a power cut, with what is on the disk and an empty page cache."""
        self.unmount()
        self.mount()

    @contextlib.contextmanager
    def frozen(self) -> Generator[None]:
        """For the length of the block every write hangs, and cannot even be killed."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def freeze(self) -> None:
        """Let every write hang until `thaw`, or for a minute: a test that hangs with it must not hang for ever.

        Frozen already is fine.
        """
        if self._guard is not None:
            return
        thaw = "sleep 60; fsfreeze -u " + shlex.quote(str(self.path))
        self._guard = subprocess.Popen(thaw, shell=True, start_new_session=True, stderr=subprocess.DEVNULL)
        _run("fsfreeze", "-f", self.path)

    def thaw(self) -> None:
        """Let writes go on. Not frozen is fine."""
        subprocess.run(["fsfreeze", "-u", self.path], capture_output=True, check=False)
        if self._guard is not None:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
            self._guard = None


@contextlib.contextmanager
def disk(kind: str, folder: Path) -> Generator[Disk]:
    """A new disk of the file system `kind`, mounted below `folder`."""
    made = Disk(kind, folder)
    made.mount()
    try:
        yield made
    finally:
        made.thaw()
        _run("umount", "--lazy", made.path)  # lazily: a test that failed may still have files open


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Generator[Path]:
    """A tmpfs below `folder`, such as one with `size=1m,nr_inodes=50`."""
    path = folder / "tmpfs"
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", path)
    try:
        yield path
    finally:
        _run("umount", "--lazy", path)


@contextlib.contextmanager
def read_only(path: Path) -> Generator[None]:
    """Mount a directory on itself, read-only."""
    _run("mount", "--bind", path, path)
    try:
        _run("mount", "-o", "remount,bind,ro", path)
        yield
    finally:
        _run("umount", "--lazy", path)


@contextlib.contextmanager
def immutable(*paths: Path) -> Generator[None]:
    """Directories and files that not even root may change. Not on every file system; see chattr(1)."""
    _run("chattr", "+i", *paths)
    try:
        yield
    finally:
        _run("chattr", "-i", *paths)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)
