"""A process that ends with a save in flight has saved, or exits with a code other than zero and the reason.

Each script has a storage that is slow, so that the save is in flight for certain when it leaves.
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from exit_server import Done, Server

import jaxckpt

BOUND_SECONDS = 30

PRELUDE = """
import asyncio, atexit, multiprocessing, os, signal, sys, threading, time
import jax.numpy as jnp, numpy as np, jaxckpt
from jaxckpt import _local, _sync
from jaxckpt._local import LocalLocation

def tree(generation):
    return {"large": jnp.full((1 << 20) + 1, generation), "small": np.full(7, generation), "step": generation}

def touch(name):
    open(name, "w").close()

put, fsync = LocalLocation.put, os.fsync

def slow_put(self, *args, **kwargs):
    touch("in flight")
    time.sleep(SECONDS)
    put(self, *args, **kwargs)

def failing_fsync(fd):
    touch("in flight")
    time.sleep(SECONDS)
    raise OSError(5, "Input/output error")

def until_in_flight():
    while not os.path.exists("in flight"):
        time.sleep(0.01)

SECONDS = 0.6
jaxckpt.save("a", tree(1))
"""

SLOW = PRELUDE + "LocalLocation.put = slow_put\n"
FAILING = PRELUDE + "os.fsync = failing_fsync\nSECONDS = 0.3\n"
START = """
pending = jaxckpt.start_save("a", tree(2), overwrite=True)
until_in_flight()
print("left with", "all done" if pending.done() else "a save in flight", flush=True)
"""

LEAVING = {
    "ends": ("", 0),
    "forgets the handle": ("del pending", 0),
    "calls sys.exit": ("sys.exit()", 0),
    "calls sys.exit with a code": ("sys.exit(3)", 3),
    "calls sys.exit with a reason": ("sys.exit('no more data')", 1),
    "raises": ("raise RuntimeError('the training failed')", 1),
    "raises in the block of the save": ("with pending:\n    raise RuntimeError('the training failed')", 1),
    "gets Ctrl-C": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "gets Ctrl-C in result": (
        "threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()\npending.result()",
        -signal.SIGINT,
    ),
    "gets Ctrl-C and goes on to its end": (
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass",
        0,
    ),
    "exits when it gets SIGTERM": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\nsignal.raise_signal(signal.SIGTERM)",
        143,
    ),
    "runs a function at exit": ("atexit.register(print, 'the end')", 0),
}


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with Server() as running:
        yield running


def run(server: Server, folder: Path, text: str) -> Done:
    done = server.start(folder, text).wait()
    assert done.seconds < BOUND_SECONDS
    return done


def generation(folder: Path) -> int:
    """The generation that is there, all of it, and verified; with it nothing that `gc` would not remove."""
    found = jaxckpt.restore(folder / "a")
    step = found["step"]
    np.testing.assert_array_equal(found["large"], np.full((1 << 20) + 1, step))
    np.testing.assert_array_equal(found["small"], np.full(7, step))
    jaxckpt.gc(folder / "a", grace_seconds=0)
    attempt = jaxckpt.verify(folder / "a").attempt
    assert sorted(os.listdir(folder / "a")) == [f"d-{attempt}", "manifest.json"]
    assert jaxckpt.verify(folder / "a").ok
    return step


def assert_reported_once(done: Done) -> None:
    assert done.code == 1
    assert done.stderr.count("jaxckpt: a background save failed: StorageError: [Errno 5] Input/output error") == 1
    assert done.stderr.count("background save") == 1


@pytest.mark.parametrize("way", LEAVING)
def test_a_script_that_leaves_in_any_way_has_saved(server: Server, tmp_path: Path, way: str) -> None:
    leave, code = LEAVING[way]
    done = run(server, tmp_path, SLOW + START + leave)
    assert done.code == code, done.stderr
    assert done.stdout.startswith("left with a save in flight\n")
    assert "background save" not in done.stderr
    assert generation(tmp_path) == 2


@pytest.mark.parametrize("way", [way for way in LEAVING if way != "gets Ctrl-C in result"])
def test_a_script_that_leaves_in_any_way_tells_of_a_save_that_failed(server: Server, tmp_path: Path, way: str) -> None:
    done = run(server, tmp_path, FAILING + START + LEAVING[way][0])
    assert done.stdout.startswith("left with a save in flight\n")
    assert_reported_once(done)
    assert generation(tmp_path) == 1


def test_every_save_that_failed_is_told_of(server: Server, tmp_path: Path) -> None:
    script = """
jaxckpt.start_save("b", tree(2)), jaxckpt.start_save("c", tree(2))
"""
    done = run(server, tmp_path, FAILING + script)
    assert done.code == 1
    assert done.stderr.count("a background save failed: StorageError: [Errno 5]") == 2
    assert not (tmp_path / "b").exists()


def test_a_failure_that_was_collected_is_not_told_of_again(server: Server, tmp_path: Path) -> None:
    collect = "try:\n    pending.result()\nexcept jaxckpt.StorageError as error:\n    print(error.errno)"
    done = run(server, tmp_path, FAILING + START + collect)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.endswith("\n5\n")


def test_a_save_that_was_cancelled_is_no_failure(server: Server, tmp_path: Path) -> None:
    done = run(server, tmp_path, SLOW + 'pending = jaxckpt.start_save("b", tree(2))\npending.cancel()')
    assert (done.code, done.stderr) == (0, "")
    assert generation(tmp_path) == 1


IN_OTHER_PLACES = {
    "asyncio.run with a handle": """
async def main():
    jaxckpt.start_save("a", tree(2), overwrite=True)
asyncio.run(main())
""",
    "a daemon thread": """
threading.Thread(target=jaxckpt.save, args=("a", tree(2)), kwargs={"overwrite": True}, daemon=True).start()
until_in_flight()
""",
    "a thread": """
threading.Thread(target=jaxckpt.save, args=("a", tree(2)), kwargs={"overwrite": True}).start()
""",
    "a function at exit": """
atexit.register(lambda: jaxckpt.save("a", tree(2), overwrite=True))
""",
    "a function at exit that does not wait": """
atexit.register(lambda: jaxckpt.start_save("a", tree(2), overwrite=True))
""",
}


@pytest.mark.parametrize("place", IN_OTHER_PLACES)
def test_a_save_from_any_place_is_finished(server: Server, tmp_path: Path, place: str) -> None:
    done = run(server, tmp_path, SLOW + IN_OTHER_PLACES[place])
    assert (done.code, done.stderr) == (0, "")
    assert generation(tmp_path) == 2


@pytest.mark.parametrize("place", ["asyncio.run with a handle", "a function at exit that does not wait"])
def test_a_save_from_any_place_that_fails_is_told_of(server: Server, tmp_path: Path, place: str) -> None:
    assert_reported_once(run(server, tmp_path, FAILING + IN_OTHER_PLACES[place]))
    assert generation(tmp_path) == 1


def test_a_loop_that_ends_cancels_its_tasks_and_so_their_saves(server: Server, tmp_path: Path) -> None:
    script = """
sync = LocalLocation.sync

def slow_sync(self, directories):
    touch("in flight")
    time.sleep(SECONDS)
    sync(self, directories)

async def main():
    saving = asyncio.create_task(jaxckpt.save_async("a", tree(2), overwrite=True))
    await asyncio.to_thread(until_in_flight)

LocalLocation.sync = slow_sync
asyncio.run(main())
"""
    done = run(server, tmp_path, PRELUDE + script)
    assert (done.code, done.stderr) == (0, "")
    assert len(os.listdir(tmp_path / "a")) == 2
    assert generation(tmp_path) == 1


def test_ctrl_c_in_a_blocking_save_ends_it_cleanly(server: Server, tmp_path: Path) -> None:
    script = """
def interrupt():
    until_in_flight()
    signal.raise_signal(signal.SIGINT)

threading.Thread(target=interrupt).start()
jaxckpt.save("a", tree(2), overwrite=True)
"""
    done = run(server, tmp_path, SLOW + script)
    assert done.code == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert len(os.listdir(tmp_path / "a")) == 2
    assert generation(tmp_path) in (1, 2)


KILLED = {
    "SIGTERM": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL": ("signal.raise_signal(signal.SIGKILL)", -signal.SIGKILL),
    "os._exit": ("os._exit(0)", 0),
    "os.abort": ("os.abort()", -signal.SIGABRT),
}


@pytest.mark.parametrize("way", KILLED)
def test_what_ends_a_process_at_once_loses_the_save_in_flight_and_nothing_else(
    server: Server, tmp_path: Path, way: str
) -> None:
    """No code of ours runs then. SIGTERM is such a way unless the script has a handler for it."""
    leave, code = KILLED[way]
    done = run(server, tmp_path, SLOW + START + leave)
    assert done.code == code
    assert done.stdout == "left with a save in flight\n"
    assert generation(tmp_path) == 1


CHILDREN = {
    "ends": "return",
    "calls sys.exit": "sys.exit(0)",
    "calls os._exit": "os._exit(0)",
    "asks for the result": """
        try:
            pending.result()
        except jaxckpt.CheckpointError as error:
            print(error, flush=True)
""",
    "leaves the block": """
        try:
            with pending:
                pass
        except jaxckpt.CheckpointError as error:
            print(error, flush=True)
""",
}
FORKS = {
    "os.fork": """
    pid = os.fork()
    if not pid:
        child()
        sys.exit()
    _, status = os.waitpid(pid, 0)
    print("the child ended with", os.waitstatus_to_exitcode(status), flush=True)
""",
    "multiprocessing": """
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    print("the child ended with", process.exitcode, flush=True)
""",
}


def forking(child: str, fork: str) -> str:
    body = child if child.startswith("\n") else f"\n        {child}\n"
    quiet = "import warnings; warnings.simplefilter('ignore')\n"
    return (
        f"{START}{quiet}if True:\n    def child():{body}\n{FORKS[fork]}\nprint('done' if pending.done() else 'not yet')"
    )


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("what", CHILDREN)
def test_a_fork_neither_waits_for_the_save_of_its_parent_nor_ends_it(
    server: Server, tmp_path: Path, what: str, fork: str
) -> None:
    done = run(server, tmp_path, SLOW + "SECONDS = 1.5\n" + forking(CHILDREN[what], fork))
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.endswith("the child ended with 0\nnot yet\n")
    assert ("the save belongs to the process that this one was forked from" in done.stdout) == (
        what in ("asks for the result", "leaves the block")
    )
    assert generation(tmp_path) == 2


@pytest.mark.parametrize("fork", FORKS)
def test_a_fork_does_not_tell_of_the_failure_of_its_parent(server: Server, tmp_path: Path, fork: str) -> None:
    done = run(server, tmp_path, FAILING + forking("time.sleep(1)", fork))
    assert done.stdout.endswith("the child ended with 0\ndone\n")
    assert_reported_once(done)


LOCKED = """
import warnings; warnings.simplefilter("ignore")
rename = os.rename

def slow_rename(*args):
    touch("in flight")
    time.sleep(0.5)
    rename(*args)


os.rename = slow_rename  # of the commit, which holds the lock
pending = jaxckpt.start_save("a", tree(2), overwrite=True)
until_in_flight()
pid = os.fork()
if not pid:
    time.sleep(10)
    os._exit(0)
pending.result()
began = time.monotonic()
threading.Timer(3, os.kill, [pid, signal.SIGKILL]).start()
jaxckpt.save("a", tree(3), overwrite=True)
print("waited" if time.monotonic() - began > 2 else "went on", flush=True)
os.kill(pid, signal.SIGKILL)
os._exit(0)
"""


def test_a_fork_does_not_hold_the_locks_of_its_parent(server: Server, tmp_path: Path) -> None:
    assert run(server, tmp_path, PRELUDE + LOCKED).stdout == "went on\n"
    assert generation(tmp_path) == 3


def test_a_fork_that_kept_the_locks_would_be_found(server: Server, tmp_path: Path) -> None:
    mutant = "_local._open_directories = type('Forgetful', (set,), {'add': lambda *_: None})()\n"
    assert run(server, tmp_path, PRELUDE + mutant + LOCKED).stdout == "waited\n"


FORGETFUL = "atexit.unregister(_sync._report_lost_failures)\n"
UNAWAITED = """
thread = threading.Thread
_sync.threading.Thread = lambda *args, **kwargs: thread(*args, **kwargs | {"daemon": True})
"""


@pytest.mark.parametrize("mutant", [SLOW + FORGETFUL + UNAWAITED, FAILING + FORGETFUL], ids=["slow", "failing"])
def test_a_save_that_is_lost_at_exit_would_be_found(server: Server, tmp_path: Path, mutant: str) -> None:
    done = run(server, tmp_path, mutant + START)
    assert done.stdout == "left with a save in flight\n"
    assert (done.code, generation(tmp_path)) == (0, 1)
