"""How small slices share large files. Pure planning."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Every member of a pack starts at a multiple of this, so that a buffer that holds a
pack can be handed to a CPU device without a copy."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One file of members: `offsets[i]` is where item `items[i]` starts in its `nbytes`."""

    items: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def plan(sizes: Sequence[int], pack_bytes: int) -> list[Pack]:
    """Put items of `sizes` bytes into packs of at most `pack_bytes`, in their order.

    An item that is larger by itself gets a pack of its own.
    """
    packs: list[Pack] = []
    items: list[int] = []
    offsets: list[int] = []
    end = 0
    for item, size in enumerate(sizes):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if items and start + size > pack_bytes:
            packs.append(Pack(tuple(items), tuple(offsets), end))
            items, offsets, start = [], [], 0
        items.append(item)
        offsets.append(start)
        end = start + size
    if items:
        packs.append(Pack(tuple(items), tuple(offsets), end))
    return packs
