"""Pure planning: what is cut, packed, named and recorded, over inputs that Hypothesis makes up."""

import asyncio
import itertools
import math
from dataclasses import dataclass

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt import CorruptCheckpointError, _manifest, _packs, _shards, _tree
from jaxckpt._budget import Budget
from jaxckpt._shards import Slice

shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])


def cells(box: Slice) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(at, at + n) for at, n in zip(box.start, box.shape, strict=True))))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Slice]]:
    """A shape and boxes that straight cuts make of it."""
    shape = draw(shapes)
    boxes = [_shards.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, box.shape[axis] - 1))
        for start, length in ((0, first), (first, box.shape[axis] - first)):
            if length:
                at = tuple(a + start * (i == axis) for i, a in enumerate(box.start))
                boxes.append(Slice(at, tuple(length if i == axis else n for i, n in enumerate(box.shape))))
    return shape, boxes


@given(shapes, itemsizes, st.integers(1, 400))
def test_blocks_are_contiguous_boxes_that_follow_each_other_and_cover_the_piece(
    shape: tuple[int, ...], itemsize: int, block_bytes: int
) -> None:
    found = _shards.blocks(shape, itemsize, block_bytes)
    order = np.arange(math.prod(shape)).reshape(shape)
    assert np.concatenate([order[b.slice.index].ravel() for b in found]).tolist() == list(range(order.size))
    assert [b.offset for b in found] == [0, *itertools.accumulate(b.nbytes for b in found)][:-1]
    assert all(_shards.is_contiguous(b.slice, shape) for b in found)
    assert all(b.nbytes <= max(block_bytes, itemsize) for b in found)


@given(shapes, st.data())
def test_contiguous_means_one_run_of_bytes(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Slice(start, tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, start, strict=True)))
    at = np.arange(math.prod(shape)).reshape(shape)[box.index].ravel()
    assert _shards.is_contiguous(box, shape) == bool((np.diff(at) == 1).all())


@given(shapes, itemsizes, st.integers(16, 4096), st.data())
def test_chunks_tile_every_shard_and_stay_within_the_target(
    array: tuple[int, ...], itemsize: int, target: int, data: st.DataObject
) -> None:
    counts = [data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in array]
    shard = tuple(n // count for n, count in zip(array, counts, strict=True))
    chunk = _shards.chunk_shape(shard, array, itemsize, target)
    found: set[tuple[int, ...]] = set()
    for corner in itertools.product(*(range(count) for count in counts)):
        box = Slice(tuple(i * n for i, n in zip(corner, shard, strict=True)), shard)
        for part in _shards.chunks(box, chunk):
            assert all(at % c == 0 for at, c in zip(part.start, chunk, strict=True)), "a chunk starts off the grid"
            assert cells(part) <= cells(box), "a chunk belongs to two shards"
            assert not cells(part) & found
            found |= cells(part)
    assert found == cells(_shards.whole(array))
    if shard == array:
        assert math.prod(chunk) * itemsize <= max(target, itemsize)


@pytest.mark.parametrize(
    ("shard", "array", "chunk"),
    [
        ((8192, 4096), (8192, 4096), (1024, 4096)),
        ((1, 2**24), (1, 2**24), (1, 2**22)),
        ((3, 2**22), (24, 2**22), (1, 2**22)),
        ((10_000_019,), (10_000_019,), (3333340,)),
        ((10_000_019,), (80_000_152,), (10_000_019,)),
        ((0, 3), (0, 3), (1, 3)),
        ((), (), ()),
    ],
)
def test_chunks_of_awkward_shards(shard: tuple[int, ...], array: tuple[int, ...], chunk: tuple[int, ...]) -> None:
    assert _shards.chunk_shape(shard, array, 4, 16 << 20) == chunk


@given(tilings())
def test_a_tiling_covers(tiling: tuple[tuple[int, ...], list[Slice]]) -> None:
    shape, boxes = tiling
    assert _shards.covers(boxes, shape)


@given(tilings(), st.data())
def test_what_overlaps_or_leaves_a_hole_does_not_cover(
    tiling: tuple[tuple[int, ...], list[Slice]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    moved = data.draw(st.integers(0, len(boxes) - 1))
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    if start != boxes[moved].start:
        boxes[moved] = Slice(start, boxes[moved].shape)
        exact = sorted(itertools.chain.from_iterable(map(cells, boxes))) == sorted(cells(_shards.whole(shape)))
        assert _shards.covers(boxes, shape) == exact


@dataclass(frozen=True)
class Place:
    """A device, as far as planning sees it."""

    id: int
    process_index: int


class Layout:
    """A sharding over devices of several processes, made from one over local devices."""

    def __init__(self, sharding: NamedSharding, places: list[Place]) -> None:
        self.sharding, self.places = sharding, places

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Place, tuple[slice, ...]]:
        return {self.places[d.id]: index for d, index in self.sharding.devices_indices_map(shape).items()}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]))
    axes = ("a", "b", "c")[: len(shape)]
    used = draw(
        st.permutations(axes).flatmap(lambda order: st.sampled_from([order[:n] for n in range(len(order) + 1)]))
    )
    spec = [*used, None] if draw(st.booleans()) else [None, *used]
    joined = tuple(used) if draw(st.booleans()) and used else None
    mesh = Mesh(np.array(jax.devices()).reshape(shape), axes)
    processes = draw(st.lists(st.integers(0, 4), min_size=8, max_size=8))
    places = [Place(number, process) for number, process in enumerate(processes)]
    return Layout(NamedSharding(mesh, PartitionSpec(joined) if joined else PartitionSpec(*spec)), places)


@given(st.lists(layouts(), min_size=1, max_size=6), st.integers(1, 4))
def test_all_processes_together_write_each_element_of_each_array_once(arrays: list[Layout], rows: int) -> None:
    """Any meshes, specs, replication and layout of processes; units of whole slices and of chunks."""
    shape = (16, 8, 8, 8)
    chunk = (rows, 8, 8, 8)
    units = [
        (number, held, box)
        for number, array in enumerate(arrays)
        for held in _shards.replicated(array, shape)  # pyright: ignore[reportArgumentType]
        for box in (_shards.chunks(held.slice, chunk) if number % 2 else [held.slice])
    ]
    writers = _shards.owners([(held.processes, box.size) for _, held, box in units])
    for number in range(len(arrays)):
        assert _shards.covers([box for at, _, box in units if at == number], shape)
    for (number, held, _), writer in zip(units, writers, strict=True):
        assert writer in held.processes
        device = held.devices[held.processes.index(writer)]
        assert device.process_index == writer
        assert device.id == min(
            p.id for p in arrays[number].places if p.process_index == writer and holds(arrays[number], p, held.slice)
        )


def holds(array: Layout, place: Place, box: Slice) -> bool:
    index = array.devices_indices_map((16, 8, 8, 8))[place]
    return tuple(part.indices(n)[0] for part, n in zip(index, (16, 8, 8, 8), strict=True)) == box.start


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 9))
def test_what_all_hold_is_shared_out_evenly_give_or_take_one_unit(sizes: list[int], count: int) -> None:
    writers = _shards.owners([(tuple(range(count)), size) for size in sizes])
    assert writers == sorted(writers)
    for process in range(count):
        written = sum(size for size, writer in zip(sizes, writers, strict=True) if writer == process)
        assert written <= sum(sizes) / count + max(sizes)


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(64, 500))
def test_packs_hold_every_item_once_in_order_aligned_and_within_their_size(sizes: list[int], pack_bytes: int) -> None:
    packs = _packs.plan(sizes, pack_bytes)
    assert [item for pack in packs for item in pack.items] == list(range(len(sizes)))
    for pack in packs:
        ends = [at + sizes[item] for item, at in zip(pack.items, pack.offsets, strict=True)]
        assert all(at % _packs.ALIGNMENT == 0 for at in pack.offsets)
        assert all(end <= at for end, at in zip(ends, pack.offsets[1:], strict=False))
        assert pack.nbytes == ends[-1]
        assert pack.nbytes <= pack_bytes or len(pack.items) == 1


paths = st.lists(
    st.text(max_size=8) | st.sampled_from(["", ".", "..", "con", "a.", "zarr.json", "x.__lock"]), max_size=4
)


@given(st.sets(paths.map(tuple), max_size=30))
def test_names_are_distinct_harmless_and_accepted_by_the_records(found: set[tuple[str, ...]]) -> None:
    leaf_paths = [path for path in found if all(text.isprintable() or True for text in path) and encodable(path)]
    names = _tree.names(leaf_paths)
    assert len({name.casefold() for name in names}) == len(names)
    for name in names:
        msgspec.convert({"name": name, "kind": "numpy", "dtype": "bool"}, type=_manifest.Leaf)


def encodable(path: tuple[str, ...]) -> bool:
    return all(text.encode("utf-8", "ignore").decode() == text for text in path)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../b", "/etc", "a//b", "a/", "./a", "a\nb", "a\\b", "a:b", "é"])
def test_the_records_refuse_a_name_that_leaves_its_directory(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": name, "kind": "numpy", "dtype": "bool"}, type=_manifest.Leaf)


@given(st.integers() | st.floats(allow_nan=False) | st.booleans() | st.text() | st.complex_numbers(allow_nan=False))
def test_python_values_come_back_exactly(value: bool | int | float | complex | str) -> None:
    if isinstance(value, str) and not encodable((value,)):
        return
    record = msgspec.json.decode(msgspec.json.encode(_manifest.Value.of(value)), type=_manifest.Value)
    assert (type(record.get()), record.get()) == (type(value), value)


def test_any_altered_byte_of_a_manifest_is_noticed() -> None:
    manifest = _manifest.Manifest(
        format_version=1,
        attempt="0" * 32,
        created="now",
        versions={},
        tree=[],
        leaves=[_manifest.Leaf(name="leaf", kind="value", value=_manifest.Value.of(7))],
        indexes=[],
        timings=_manifest.Timings(),
    )
    data = _manifest.encode_manifest(manifest)
    assert _manifest.decode_manifest(data, "here") == manifest
    for position, bit in itertools.product(range(len(data)), range(8)):
        altered = bytearray(data)
        altered[position] ^= 1 << bit
        try:
            assert _manifest.decode_manifest(bytes(altered), "here") == manifest
        except CorruptCheckpointError as error:
            assert str(error).startswith("here: ")
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match=r"here: "):
            _manifest.decode_manifest(data[:length], "here")


@given(st.integers(10, 100), st.lists(st.tuples(st.integers(0, 150), st.integers(0, 3)), max_size=30))
def test_the_budget_is_never_exceeded_but_by_one_that_is_alone(limit: int, asks: list[tuple[int, int]]) -> None:
    used: list[int] = []

    async def ask(budget: Budget, nbytes: int, steps: int) -> None:
        async with budget.reserve(nbytes):
            used.append(nbytes)
            assert sum(used) <= limit or len([n for n in used if n]) == 1
            for _ in range(steps):
                await asyncio.sleep(0)
            used.remove(nbytes)

    async def main() -> None:
        budget = Budget(limit)
        async with asyncio.TaskGroup() as tasks:
            for nbytes, steps in asks:
                tasks.create_task(ask(budget, nbytes, steps))

    asyncio.run(main())
    assert not used


def test_a_cancelled_wait_gives_its_turn_to_the_next() -> None:
    async def main() -> None:
        budget = Budget(10)
        await budget.acquire(8)
        large = asyncio.create_task(budget.acquire(9))
        small = asyncio.create_task(budget.acquire(2))
        await asyncio.sleep(0)
        assert not small.done(), "asked later, so it waits behind the large one"
        large.cancel()
        await asyncio.wait_for(small, 1)
        budget.release(8)
        budget.release(2)
        await asyncio.wait_for(budget.acquire(10), 1)

    asyncio.run(main())
