"""Several JAX processes save and restore one checkpoint: whole or not at all, and nobody waits for ever."""

import itertools
import os
from pathlib import Path

import cluster
import processes_child as child
import pytest
from cluster import Cluster

import jaxckpt

MIB = 1 << 20


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_what_some_processes_saved_others_restore(tmp_path: Path, writers: int) -> None:
    written = cluster.run(writers, child.save, str(tmp_path / "a"))
    cluster.run(writers, child.serialize, str(tmp_path / "arrays"))
    assert jaxckpt.verify(tmp_path / "a").ok
    assert all(share == written[0] for share in written)
    assert len(written[0]) == writers
    assert max(written[0]) <= sum(written[0]) / writers + jaxckpt.SaveOptions().pack_below_bytes
    for readers in (1, 2, 4):
        assert cluster.run(readers, child.restore, str(tmp_path / "a")) == [[]] * readers
        assert cluster.run(readers, child.deserialize, str(tmp_path / "arrays")) == [[]] * readers


@pytest.mark.parametrize("transfer", ["pinned", "staged", "direct"])
def test_every_transfer_takes_a_part_of_a_shard(tmp_path: Path, transfer: str) -> None:
    cluster.run(2, child.save, str(tmp_path / "a"), transfer)
    assert jaxckpt.verify(tmp_path / "a").ok
    assert cluster.run(1, child.restore, str(tmp_path / "a")) == [[]]


@pytest.mark.parametrize("shapes", [[(64 * MIB,)], [(7, 1 << 20)] * 9, [(1000,)] * 1000, [(3 * MIB,), (5 * MIB,)] * 8])
def test_replicated_arrays_are_written_by_all_processes(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    (written, *_) = cluster.run(4, child.save_replicated, str(tmp_path / "a"), shapes)
    assert max(written) <= 0.3 * sum(written), written


def test_an_array_that_lives_on_another_process_alone_is_saved_by_that(tmp_path: Path) -> None:
    first, second = cluster.run(2, child.submesh, str(tmp_path / "a"))
    assert first == ([], [0, 0, 0], 2)
    assert second == ([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]], [0, 0, 0], 2)


def test_many_saves_leave_no_growth(tmp_path: Path) -> None:
    for before_bytes, before_files, before_threads, bytes_, files, threads in cluster.run(
        4, child.many_saves, str(tmp_path), 100
    ):
        assert bytes_ - before_bytes < 32 * MIB
        assert files <= before_files + 2
        assert threads <= before_threads


def test_two_saves_in_flight_and_a_restore_beside_a_save_do_not_meet(tmp_path: Path) -> None:
    assert cluster.run(2, child.two_in_flight, str(tmp_path / "x")) == [[], []]
    assert cluster.run(2, child.save_beside_a_restore, str(tmp_path / "y")) == [[], []]


TREE = "LeafMismatchError: the tree with"
SEES = "which this process does not see; all processes must save to one path on storage that they share"


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("value", "process 1 failed, so nothing was saved: LeafMismatchError: the tree with 2 leaves", TREE),
        ("leaves", "process 1 failed, so nothing was saved: LeafMismatchError: the tree with 3 leaves", TREE),
        ("path", "process 1 failed, so nothing was saved: StorageError", SEES),
        ("order", "process 1 failed, so nothing was saved: StorageError", SEES),
        ("bad leaf", "process 1 failed, so nothing was saved: UnsupportedLeafError: leaf f", "UnsupportedLeafError"),
        ("late", "process 1 of 2 did not arrive within 3 seconds in the phase 'write' of save number 0", "saved"),
        ("arrays", "process 1 failed, so nothing was saved: LeafMismatchError: process 1 ser", "LeafMismatchError"),
    ],
)
def test_processes_that_do_not_save_the_same_are_told_so(tmp_path: Path, kind: str, first: str, second: str) -> None:
    found = cluster.run(2, child.unequal, str(tmp_path), kind)
    assert first in found[0]
    assert second in found[1]
    assert not list(tmp_path.rglob("manifest.json"))
    assert not list(tmp_path.rglob("zarr.json"))


FAULTS = ["SIGSTOP", "SIGKILL", "exception", "ENOSPC"]
PHASES = ["begin", "write", "records", "commit"]


@pytest.mark.parametrize(("fault", "phase", "culprit"), list(itertools.product(FAULTS, PHASES, [0, 1])))
def test_a_process_that_fails_stops_all_and_harms_nothing(
    tmp_path: Path, fault: str, phase: str, culprit: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a")
    with Cluster(3, child.with_fault, path, culprit, phase, fault) as running:
        assert [running.said(index) for index in range(3)] == ["ready"] * 3
        told = {index: running.said(index, 30) for index in range(3) if index != culprit}
    committed = phase == "commit" and culprit == 1  # it has done its part by then
    for outcome in told.values():
        if culprit == 0 and fault == "SIGKILL":
            # JAX ends the other processes, or they notice that the service is gone: never a success.
            assert outcome.error == "it died" or outcome.value[0].startswith(("PeerError: process 0", "SaveTimeoutErr"))
            continue
        message, seconds = outcome.value
        assert seconds < 15
        assert message == "saved" if committed else f"process {culprit}" in message, message
    assert cluster.run(1, child.restore_both, path) == [1.0 if committed else 0.0]
    assert jaxckpt.verify(path).ok
    cluster.run(2, child.save_again, path)
    assert jaxckpt.gc(path, grace_seconds=0).kept == ()
    assert sorted(name[:2] for name in os.listdir(path)) == ["d-", "ma"]
    capfd.readouterr()  # what JAX says of dead processes
