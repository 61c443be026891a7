"""The device-to-host leg of a save by itself: the ways that jaxckpt has, beside one large copy of as many bytes."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import SingleDeviceSharding

from jaxckpt._shards import blocks
from jaxckpt._transfer import PINNED, PinnedCopies, copy_into, host_bytes

STAGED, ONE_BY_ONE, OVERLAPPED, LARGE = "staged", "pinned, one by one", "pinned, overlapped", "one large copy"
SLOT_BYTES = 128 << 20

Way = Callable[[], object]


def ways(shards: Sequence[jax.Array], whole: jax.Array) -> dict[str, Way]:
    """Each brings `shards`, arrays on one device each, to the host; the last one `whole`, an array of as many bytes.

    The staged baseline has a buffer of 128 MiB, which is all that stays of what it copies.
    """
    slot = host_bytes(min(SLOT_BYTES, max(shard.nbytes for shard in shards)))
    pinned = SingleDeviceSharding(next(iter(whole.devices())), memory_kind=PINNED)

    def staged() -> None:
        for shard in shards:
            for block in blocks(shard.shape, shard.dtype.itemsize, slot.nbytes):
                copy_into(slot, shard, block.slice)

    return {
        STAGED: staged,
        ONE_BY_ONE: lambda: [PinnedCopies().start([shard])() for shard in shards],
        OVERLAPPED: lambda: PinnedCopies().start(shards)(),
        LARGE: lambda: jax.block_until_ready(jax.device_put(whole, pinned)),
    }


def seconds_of(way: Way) -> float:
    """How long it takes; what it returns is freed outside of that."""
    began = time.perf_counter()
    kept = way()
    took = time.perf_counter() - began
    del kept
    return took


def rates(timed: Mapping[str, Callable[[], float]], nbytes: int, rounds: int) -> dict[str, float]:
    """The median rate of each in GB/s, after one that does not count; they take turns."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, seconds in timed.items():
            took = seconds()
            if number:
                samples[name].append(took)
    return {name: nbytes / 1e9 / statistics.median(found) for name, found in samples.items()}
