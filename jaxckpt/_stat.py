"""What a storage tells of a file."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stat:
    """A file or an object.

    Attributes:
        nbytes: Its size.
        modified: When it was last changed, seconds since 1970.
        identity: What all links to it share: the device and inode of a local file.
        links: How many they are.
    """

    nbytes: int
    modified: float
    identity: tuple[int, int] = (0, 0)
    links: int = 1
