"""Damage is an error that names the file and the leaf, or harmless; wrong values never come back.

Every case damages a real file, and restores and verifies with the public calls.
"""

import asyncio
import collections
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, RestoreOptions, SaveOptions

SEED = 20261201
TIMEOUT_SECONDS = 10
SHARDING = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))
OPTIONS = SaveOptions(pack_below_bytes=64, chunk_bytes=4096)
"""Shards of 64 bytes and more get Zarr arrays of their own, the others share a pack."""


def tree_of(step: int) -> dict[str, Any]:
    return {
        "sharded": jax.device_put(jnp.arange(48, dtype=jnp.float32).reshape(8, 6) + step, SHARDING),
        "whole": np.arange(step, step + 40, dtype=np.int16),
        "small": {"a": np.arange(step, step + 5, dtype=np.uint8), "b": jnp.full(3, step, jnp.bfloat16)},
        "step": step,
    }


def same(found: Any, expected: Any) -> bool:
    """Whether two trees are equal in every dtype, shape and bit."""
    return jax.tree.structure(found) == jax.tree.structure(expected) and all(
        type(a) is type(b) and np.asarray(a).dtype == np.asarray(b).dtype and bits(a) == bits(b)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


def bits(leaf: Any) -> tuple[Any, ...]:
    return np.shape(leaf), np.asarray(leaf).tobytes()


class Checkpoint:
    """A saved checkpoint, what is in it, and how a restore of it ends."""

    def __init__(self, path: Path, step: int = 1) -> None:
        self.path = path
        self.tree = tree_of(step)
        info = jaxckpt.save(path, self.tree, options=OPTIONS)
        self.data = path / f"d-{info.attempt}"
        self.names = {leaf.name for leaf in info.leaves}

    def files(self) -> list[Path]:
        return sorted(file for file in self.path.rglob("*") if not file.is_dir())

    def restored(self, **options: Any) -> CheckpointError | bool:
        """Whether the values are right, or the error."""
        try:
            found = jaxckpt.restore(self.path, options=RestoreOptions(timeout_seconds=TIMEOUT_SECONDS, **options))
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            return error
        return same(found, self.tree)

    def is_data(self, file: Path) -> bool:
        """Whether `file` holds the bytes of leaves."""
        return file.name.startswith("c.")

    def check_message(self, error: Exception, file: Path, *others: str) -> None:
        """The message names the damaged file, or one of `others`, and where that holds data also a leaf."""
        names = [str(file.relative_to(self.path)), *others]
        assert any(name in str(error) for name in names), f"{error} names none of {names}"
        if self.is_data(file):
            assert any(f"leaf {name}:" in str(error) for name in self.names), f"{error} names no leaf"


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "checkpoint")


def bits_of(file: Path) -> range:
    return range(8 * file.stat().st_size)


def is_sampled(bit: int) -> bool:
    """One bit of every byte, each time another one."""
    return bit % 8 == bit // 8 % 8


@contextmanager
def flipped(file: Path, *bit: int) -> Iterator[None]:
    """One bit, or some, of a file are the other way round for the length of the block."""
    pristine = file.read_bytes()
    data = bytearray(pristine)
    for number in bit:
        data[number // 8] ^= 1 << (number % 8)
    file.write_bytes(data)
    yield
    file.write_bytes(pristine)


def describe(counts: collections.Counter[str], what: str) -> None:
    print(f"{what}: {dict(counts)}, silent: {counts['silent']}")


# Bits


@pytest.mark.parametrize("name", ["manifest.json", "index-0.json"])
def test_every_flipped_bit_of_a_record_is_detected(saved: Checkpoint, name: str, long: bool) -> None:
    [file] = [file for file in saved.files() if file.name == name]
    counts = collections.Counter[str]()
    for bit in bits_of(file):
        with flipped(file, bit):
            error = saved.restored()
            assert isinstance(error, CorruptCheckpointError), f"bit {bit} of {name}: {error}"
            saved.check_message(error, file)
            counts["detected"] += 1
            if long or is_sampled(bit):
                report = jaxckpt.verify(saved.path)
                assert not report.ok, f"verify passes bit {bit} of {name}"
                assert any(name in fault.file for fault in report.faults)
                counts["and reported by verify"] += 1
    describe(counts, f"bits of {name}")
    assert counts["detected"] == 8 * file.stat().st_size > 4000


def test_every_flipped_bit_of_a_zarr_json_is_reported_by_verify_and_harms_no_restore(saved: Checkpoint) -> None:
    files = [file for file in saved.files() if file.name == "zarr.json"]
    assert len(files) == 3
    counts = collections.Counter[str]()
    for bit in range(max(len(bits_of(file)) for file in files)):  # of all of them at once, each reported by its name
        damaged = [file for file in files if bit < len(bits_of(file))]
        with ExitStack() as stack:
            for file in damaged:
                stack.enter_context(flipped(file, bit))
            report = jaxckpt.verify(saved.path)
            if is_sampled(bit):
                assert saved.restored() is True
                counts["harmless to a restore"] += len(damaged)
        assert sorted(Path(fault.file) for fault in report.faults) == damaged, f"verify passes bit {bit}"
        counts["reported"] += len(damaged)
    describe(counts, "bits of zarr.json")
    assert counts["reported"] > 8000
    assert counts["harmless to a restore"] > 1000


def flip_data(saved: Checkpoint, rng: random.Random, cases: int, **options: Any) -> collections.Counter[str]:
    """How restores end when one to three bits of one data file are flipped."""
    files = [file for file in saved.files() if saved.is_data(file)]
    counts = collections.Counter[str]()
    for _ in range(cases):
        file = rng.choice(files)
        chosen = rng.sample(bits_of(file), rng.choice((1, 1, 1, 2, 3)))
        with flipped(file, *chosen):
            outcome = saved.restored(**options)
            if isinstance(outcome, CheckpointError):
                saved.check_message(outcome, file)
                assert rng.random() > 0.1 or not jaxckpt.verify(saved.path).ok
        counts["detected" if isinstance(outcome, CheckpointError) else "harmless" if outcome else "silent"] += 1
    return counts


@pytest.mark.parametrize("memory_map", [False, True])
def test_flipped_bits_of_data_are_detected_unless_no_leaf_has_them(
    saved: Checkpoint, memory_map: bool, long: bool
) -> None:
    counts = flip_data(saved, random.Random(SEED), 40_000 if long else 1500, memory_map=memory_map)
    describe(counts, f"seed {SEED}, bits of data, memory_map={memory_map}")
    assert counts["silent"] == 0
    assert counts["detected"] > 1000
    assert counts["harmless"] > 10  # between the members of a pack


def test_without_verification_flipped_bits_are_silent(saved: Checkpoint) -> None:
    """The first mutant: it shows that the test above sees the hashes at work, and nothing else."""
    counts = flip_data(saved, random.Random(SEED), 300, verify=False)
    describe(counts, f"mutant verify=False, seed {SEED}")
    assert counts["silent"] > 200


def test_with_one_hash_for_everything_flipped_bits_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mutant."""
    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", lambda data: "0" * 32)
    saved = Checkpoint(tmp_path / "checkpoint")
    counts = flip_data(saved, random.Random(SEED), 300)
    describe(counts, f"mutant digest, seed {SEED}")
    assert counts["silent"] > 200
    with flipped(saved.data / "arrays" / "whole" / "zarr.json", 77):
        assert jaxckpt.verify(saved.path).ok


def test_verify_names_every_damaged_leaf_and_no_other(saved: Checkpoint) -> None:
    whole, sharded = saved.data / "arrays" / "whole" / "c.0", saved.data / "arrays" / "sharded" / "c.1.0"
    with flipped(whole, 9), flipped(sharded, 3):
        damaged = {name: faults for name, faults in jaxckpt.verify(saved.path).by_leaf().items() if faults}
    assert {name: [Path(fault.file) for fault in faults] for name, faults in damaged.items()} == {
        "whole": [whole],
        "sharded": [sharded],
    }


# Bits of an array of its own


@pytest.fixture
def array(tmp_path: Path) -> tuple[Path, jax.Array]:
    value = jax.device_put(jnp.arange(96, dtype=jnp.int8).reshape(16, 6), SHARDING)
    asyncio.run(jaxckpt.async_serialize([value], [tmp_path / "array"]))
    return tmp_path / "array", value


async def deserialized(path: Path) -> jax.Array | CheckpointError:
    try:
        # A sharding says nothing of shape and dtype: what the file says is what comes back.
        [found] = await jaxckpt.async_deserialize([path], [SHARDING])
    except CheckpointError as error:
        return error
    return found


def test_every_flipped_bit_of_an_array_is_detected_or_harmless(array: tuple[Path, jax.Array]) -> None:
    path, value = array
    counts = collections.Counter[str]()

    async def flip_all() -> None:
        for file in sorted(path.iterdir()):
            for bit in bits_of(file):
                with flipped(file, bit):
                    found = await deserialized(path)
                if isinstance(found, CheckpointError):
                    assert isinstance(found, CorruptCheckpointError | jaxckpt.LeafMismatchError)
                    assert str(path) in str(found)
                    counts["detected"] += 1
                else:
                    assert same(found, value), f"bit {bit} of {file.name} gives {found}"
                    counts[f"harmless ({file.name})"] += 1

    asyncio.run(flip_all())
    describe(counts, "bits of an array of async_serialize")
    assert counts["detected"] > 4000
    assert set(counts) == {"detected", "harmless (zarr.json)"}  # what is for other readers: codecs, fill value


# Whole files


def deleted(file: Path, sibling: Path, older: Path) -> None:
    file.unlink()


def emptied(file: Path, sibling: Path, older: Path) -> None:
    file.write_bytes(b"")


def halved(file: Path, sibling: Path, older: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def one_byte_longer(file: Path, sibling: Path, older: Path) -> None:
    with file.open("ab") as end:
        end.write(b"\0")


def one_byte_shorter(file: Path, sibling: Path, older: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def swapped_with_a_sibling(file: Path, sibling: Path, older: Path) -> None:
    kept = sibling.read_bytes()
    shutil.copy(file, sibling)
    file.write_bytes(kept)


def replaced_by_an_older_one(file: Path, sibling: Path, older: Path) -> None:
    shutil.copy(older, file)


def a_directory(file: Path, sibling: Path, older: Path) -> None:
    file.unlink()
    file.mkdir()


def a_link_to_the_real_content(file: Path, sibling: Path, older: Path) -> None:
    elsewhere = older.parent / f"moved-{file.name}"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


def a_link_to_itself(file: Path, sibling: Path, older: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def a_fifo(file: Path, sibling: Path, older: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def zeroed(file: Path, sibling: Path, older: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


DAMAGE = [
    *(deleted, emptied, halved, one_byte_longer, one_byte_shorter, zeroed),
    *(swapped_with_a_sibling, replaced_by_an_older_one),
    *(a_directory, a_link_to_the_real_content, a_link_to_itself, a_fifo),
]
Damage = Callable[[Path, Path, Path], None]


def siblings(checkpoint: Checkpoint) -> Iterator[tuple[Path, Path]]:
    """Every file, and another one of the same kind, or of any kind where there is none."""
    files = checkpoint.files()
    for file in files:
        others = sorted(files, key=lambda other: (other == file, other.name != file.name, other.suffix != file.suffix))
        yield file.relative_to(checkpoint.path), others[0].relative_to(checkpoint.path)


def counterpart(older: Checkpoint, newer: Checkpoint, file: Path) -> Path:
    """The file of the same name in the older checkpoint; only the attempt in the path differs."""
    return older.path / str(file).replace(newer.data.name, older.data.name)


def test_every_damage_to_every_file_is_an_error_that_names_it_or_harmless(tmp_path: Path) -> None:
    older, newer = Checkpoint(tmp_path / "older", 1), Checkpoint(tmp_path / "newer", 2)
    shutil.copytree(newer.path, tmp_path / "pristine")
    counts = collections.Counter[str]()
    for name, sibling in siblings(newer):
        for damage in DAMAGE:
            shutil.copytree(older.path, tmp_path / "kept")
            damage(newer.path / name, newer.path / sibling, counterpart(older, newer, name))
            for memory_map in (False, True):
                outcome = newer.restored(memory_map=memory_map)
                if isinstance(outcome, CheckpointError):
                    newer.check_message(outcome, newer.path / name, *suspects(sibling, damage))
                    counts["detected"] += 1
                else:
                    assert outcome, f"silent: {name} {damage.__name__}"
                    assert name.name == "zarr.json"  # a restore needs nothing of it
                    counts["harmless"] += 1
            check_report(newer, name, sibling, damage)
            for path, pristine in ((newer.path, tmp_path / "pristine"), (older.path, tmp_path / "kept")):
                shutil.rmtree(path)
                shutil.copytree(pristine, path)
            shutil.rmtree(tmp_path / "kept")
            assert newer.restored() is True
    describe(counts, f"{len(DAMAGE)} kinds of damage to every file")
    assert counts["detected"] == 2 * 6 * len(DAMAGE)
    assert counts["harmless"] == 2 * 3 * len(DAMAGE)


def suspects(sibling: Path, damage: Damage) -> list[str]:
    """What else an error may name: the other file, or the index that an older manifest names in vain."""
    if damage is swapped_with_a_sibling:
        return [str(sibling)]
    return ["index-0.json"] if damage is replaced_by_an_older_one else []


def check_report(checkpoint: Checkpoint, name: Path, sibling: Path, damage: Damage) -> None:
    """`verify` says of every file that was damaged that it was."""
    unchanged = damage is replaced_by_an_older_one and name.name == "zarr.json"
    try:
        report = jaxckpt.verify(checkpoint.path)
    except CheckpointNotFoundError:
        assert damage is deleted
        assert name.name == "manifest.json"
        return
    assert report.ok == unchanged, f"{name} {damage.__name__}: {report.faults}"
    names = [name.name, *suspects(sibling, damage)]
    assert unchanged or any(suspect in fault.problem for suspect in names for fault in report.faults)


def test_every_damage_to_every_file_of_an_array_is_an_error_or_harmless(
    tmp_path: Path, array: tuple[Path, jax.Array]
) -> None:
    path, value = array
    asyncio.run(jaxckpt.async_serialize([value + 1], [tmp_path / "older"]))
    shutil.copytree(path, tmp_path / "pristine")
    counts = collections.Counter[str]()
    for name in os.listdir(path):
        for damage in DAMAGE:
            shutil.copytree(tmp_path / "older", tmp_path / "kept")
            damage(path / name, path / ("c.0.0" if name == "c.1.0" else "c.1.0"), tmp_path / "kept" / name)
            found = asyncio.run(deserialized(path))
            if isinstance(found, CheckpointError):
                assert str(path) in str(found)
                counts["detected"] += 1
            else:
                assert same(found, value), f"silent: {name} {damage.__name__}"
                counts[f"harmless ({name} {damage.__name__})"] += 1
            shutil.rmtree(path)
            shutil.copytree(tmp_path / "pristine", path)
            shutil.rmtree(tmp_path / "kept")
    describe(counts, f"{len(DAMAGE)} kinds of damage to every file of an array")
    assert counts["harmless (zarr.json one_byte_shorter)"] == 1  # its last line feed
    assert counts["detected"] == 4 * len(DAMAGE) - 1


def test_a_directory_that_is_a_link_to_the_real_one_is_refused_by_name(tmp_path: Path) -> None:
    saved = Checkpoint(tmp_path / "checkpoint")
    inner = [path for path in sorted(saved.path.rglob("*")) if path.is_dir()]
    counts = collections.Counter[str]()
    for number, directory in enumerate(inner):
        shutil.move(directory, tmp_path / str(number))
        directory.symlink_to(tmp_path / str(number))
        error, report = saved.restored(), jaxckpt.verify(saved.path)
        assert isinstance(error, CorruptCheckpointError), directory
        assert str(directory.relative_to(saved.path)) in str(error)
        assert "a link, or a file in place of a directory" in str(error)
        assert not report.ok
        assert not any(str(tmp_path / str(number)) in fault.file for fault in report.faults)
        directory.unlink()
        directory.write_text("a file in place of a directory")
        assert isinstance(saved.restored(), CorruptCheckpointError)
        assert not jaxckpt.verify(saved.path).ok
        directory.unlink()
        assert isinstance(saved.restored(), CorruptCheckpointError)
        assert not jaxckpt.verify(saved.path).ok
        shutil.move(tmp_path / str(number), directory)
        assert saved.restored() is True
        counts["detected"] += 3
    describe(counts, "directories that are links, files, or missing")
    assert len(inner) == 6


def test_a_file_that_nothing_names_is_reported_and_harms_no_restore(saved: Checkpoint) -> None:
    (saved.data / "packs" / "surplus").write_text("x")
    assert saved.restored() is True
    [fault] = jaxckpt.verify(saved.path).faults
    assert fault.problem.endswith("packs/surplus: no record names this file")
