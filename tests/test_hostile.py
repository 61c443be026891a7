"""What somebody forged is a typed error or harmless: in bounded time and memory, and without a look outside.

A forger can compute every hash. All that is forged here has right ones, unless a wrong one is the point.
"""

import asyncio
import collections
import gzip
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import hostile_child
import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hostile_child import SLACK_BYTES, Forged, envelope_of

import jaxckpt
from jaxckpt import SaveOptions

SECONDS = 15.0
SECONDS_PER_MIB = 0.1
FACTORS = {"a million leaves": 20, "a million keys that are empty lists": 25}
"""Of the input, what memory these may take; others 10. Their records are shorter than Python's smallest objects."""
FEW = {"a million leaves": ["describe", "ls", "restore", "verify"]}
HANG_SECONDS = 60.0
Forge = Callable[[Forged], None]
CASES: dict[str, Forge] = {}


def case(forge: Forge) -> Forge:
    CASES[forge.__name__.replace("_", " ")] = forge
    return forge


def changed(name: str, forge: Callable[[Forged], Any]) -> None:
    """A case that changes the records, which are then written."""

    def change(forged: Forged) -> None:
        forge(forged)
        forged.write()

    CASES[name] = change


# Leaves

SHAPES: list[Any] = [
    *([-1], [-(2**63)], [2**63 - 1], [2**63], [2**64], [10**30], [2**62, 2**62], [2**31, 2**31, 2**31], [2**40]),
    *([0, 2**62], [2**62, 0, 4], [2**62, 2**62, 0], [0] * 64, [1] * 40, [1] * 64, [1] * 65, [1] * 100_000),
    *([8], [8, 6, 1], [6, 8], [48], [], [7, 6], [8.0, 6], ["8", 6], [True, 6], [None], [[8, 6]], None, 8, "8", {}),
]
DTYPES = [
    *("object", "O", "str", "U8", "S8", "V4", "datetime64[s]", "void", "longdouble", "float128", "generic", "number"),
    *("finfo", "iinfo", "__doc__", "__name__", "__path__", "_ml_dtypes_ext", "version", "np", "bfloat16.dtype"),
    *("", "FLOAT32", "float32\n", "<f4", "f4", ">f4", "float32,int8", "numpy.float32", "\0", "x" * 100_000),
    *("int8", "int64", "float64", "complex128", "bool"),
    *(name for name in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type)),
]
KEYS = [
    ("threefry2x32", [5, 2], "uint32"),
    ("threefry2x32", [4, 3], "uint32"),
    ("threefry2x32", [2], "float32"),
    ("threefry2x32", [], "uint32"),
    ("rbg", [3], "uint32"),
    ("unsafe_rbg", [3, 4], "uint16"),
    ("no such PRNG", [3, 4], "uint32"),
    ("../../x", [12], "uint8"),
    (None, [12], "uint8"),
    ("", [3, 4], "uint32"),
]
VALUES = [
    *(
        ("int", text)
        for text in ("", "zz", "0x", "1" * 4400, "0x" + "f" * 4_000_000, "-0x1", "--1", "1e9", "0x1_0", "٣")
    ),
    *(("float", text) for text in ("", "zz", "0x1p99999", "-0x1p99999", "1e999", "nan", "inf", "0x" + "f" * 1_000_000)),
    *(("complex", text) for text in ("", "1", "1 2 3", "a b", "0x1p99999 0x0p0", "nan nan", " ".join("1" * 100_000))),
    *(("bool", text) for text in ("", "true", "1", "x")),
    *(("str", text) for text in ("", "\0", "x" * 4_000_000, "\x1b[2J", "\u202e")),
    *(("bytes", "x"), ("None", ""), ("type", "int"), ("eval", "1+1"), ("int", None), ("int", 3), (None, "3")),
]
NAMES = [
    *("../../etc/passwd", "/etc/passwd", "a/../b", "a/..", "..", ".", "", "/", "a//b", "a/", "a\0b", "a\n", "a b", "é"),
    *("a" * 300, "a/" * 400 + "a", "a" * 2000, "C:\\x", "file:///etc/passwd", "s3://bucket/x", "~/x", "%2e%2e/x"),
]

for shape in SHAPES:
    changed(f"shape {ascii(shape)[:40]}", lambda f, shape=shape: f.leaf("large").update(shape=shape))
    changed(f"piece shape {ascii(shape)[:40]}", lambda f, shape=shape: f.pieces("large")[0].__setitem__(2, shape))
    changed(f"piece start {ascii(shape)[:40]}", lambda f, shape=shape: f.pieces("large")[0].__setitem__(1, shape))
    changed(
        f"the only piece and its leaf of shape {ascii(shape)[:40]}",
        lambda f, shape=shape: (
            f.leaf("small/a").update(shape=shape),
            f.pieces("small/a")[0].__setitem__(2, shape),
            f.pieces("small/a")[0].__setitem__(1, [0] * len(shape) if isinstance(shape, list) else shape),
        ),
    )
for dtype in DTYPES:
    changed(f"dtype {ascii(dtype)[:40]}", lambda f, dtype=dtype: f.leaf("small/a").update(dtype=dtype))
    changed(
        f"JAX dtype {ascii(dtype)[:40]}", lambda f, dtype=dtype: f.leaf("small/a").update(dtype=dtype, kind="array")
    )
for impl, shape, dtype in KEYS:
    changed(
        f"key {impl} {shape} {dtype}",
        lambda f, impl=impl, shape=shape, dtype=dtype: f.leaf("large").update(
            impl=impl, shape=shape, dtype=dtype, kind="key"
        ),
    )
for kind, text in VALUES:
    changed(
        f"value {kind} {ascii(text)[:20]}",
        lambda f, kind=kind, text=text: f.leaf("text").update(value={"type": kind, "text": text}),
    )
for name in NAMES:
    changed(f"leaf name {ascii(name)[:40]}", lambda f, name=name: f.leaf("large").update(name=name))
    changed(f"file name {ascii(name)[:40]}", lambda f, name=name: f.index["files"][0].update(name=name))
    changed(f"index name {ascii(name)[:40]}", lambda f, name=name: f.manifest["indexes"][0].update(name=name))
for attempt in ("../x", "/etc", "0" * 31, "0" * 33, "0" * 32 + "\n", "A" * 32, "", "../" * 10 + "ab", None, 0):
    changed(f"attempt {attempt!r}", lambda f, attempt=attempt: f.manifest.update(attempt=attempt))
for kind in ("value", "key", "scalar", "object", "pickle", "", None):
    changed(f"an array of kind {kind}", lambda f, kind=kind: f.leaf("large").update(kind=kind))
    changed(f"a value of kind {kind}", lambda f, kind=kind: f.leaf("text").update(kind=kind))


# The tree


def tree(name: str, nodes: list[dict[str, Any]] | Callable[[int], list[dict[str, Any]]]) -> None:
    """A case with other records of the structure; `nodes` may depend on the number of leaves."""
    changed(
        f"tree: {name}",
        lambda f: f.manifest.update(tree=nodes(len(f.manifest["leaves"])) if callable(nodes) else nodes),
    )


def dict_of(keys: list[Any], children: Any = None) -> list[dict[str, Any]]:
    """Five leaves in one dict."""
    return [{"type": "dict", "children": children or list(range(len(keys))), "keys": keys}]


def chain(depth: int, count: int = 5) -> list[dict[str, Any]]:
    """All leaves in one list, deep below the root."""
    nodes = [{"type": "list", "children": list(range(count))}]
    return nodes + [{"type": "tuple", "children": [~at]} for at in range(depth)]


def namedtuple(name: Any, fields: list[Any]) -> list[dict[str, Any]]:
    return [{"type": "namedtuple", "name": name, "keys": fields, "children": list(range(5))}]


def classes(count: int) -> list[dict[str, Any]]:
    made = [{"type": "namedtuple", "name": f"T{number}", "keys": [], "children": []} for number in range(count)]
    return [*made, {"type": "list", "children": [*range(5), *(~number for number in range(count))]}]


def laughs(levels: int) -> list[dict[str, Any]]:
    nodes = [{"type": "list", "children": list(range(5))}]
    return nodes + [{"type": "list", "children": [~at] * 10} for at in range(levels)]


def nested_key(depth: int) -> Any:
    key: Any = 1
    for _ in range(depth):
        key = [key]
    return key


ROOT = {"type": "list", "children": [0, 1, 2, 3, 4]}
tree("empty", [])
tree("an empty root", [{"type": "list"}])
tree("a root that is its own child", [{"type": "list", "children": [0, 1, 2, 3, 4, -1]}])
tree("a child that comes later", [{"type": "list", "children": [~1]}, ROOT])
tree("two nodes that hold each other", [{"type": "list", "children": [~1]}, {"type": "list", "children": [~0, 0, 1]}])
tree("a node that nobody holds", [{"type": "none"}, ROOT])
tree("a node that two hold", [{"type": "none"}, {"type": "list", "children": [0, 1, 2, 3, 4, ~0, ~0]}])
tree("a leaf that two hold", [{"type": "list", "children": [0, 0, 1, 2, 3, 4]}])
tree("a leaf that nobody holds", [{"type": "list", "children": [0, 1, 2, 3]}])
tree("a leaf that does not exist", [{"type": "list", "children": [0, 1, 2, 3, 4, 5]}])
tree("a huge leaf number", [{"type": "list", "children": [0, 1, 2, 3, 10**30]}])
tree("a huge node number", [{"type": "list", "children": [0, 1, 2, 3, 4, -(10**30)]}])
tree("a number that is a float", [{"type": "list", "children": [0, 1, 2, 3, 4.5]}])
tree("a billion laughs", laughs(9))
tree("laughs without end", laughs(400))
tree("as deep as it may be", chain(499))
tree("too deep", chain(501))
tree("far too deep", chain(30_000))
tree("an unknown kind of node", [{"type": "set", "children": [0, 1, 2, 3, 4]}])
tree("a none with children", [{"type": "none", "children": [0, 1, 2, 3, 4], "keys": [1, 2, 3, 4, 5]}])
tree("an object by the name of a function", [{"type": "object", "name": "os.system", "children": [0], "keys": ["x"]}])
tree("too few keys", [{"type": "dict", "children": [0, 1, 2, 3, 4], "keys": ["a"]}])
tree("too many keys", [{"type": "dict", "children": [0, 1, 2, 3, 4], "keys": ["a"] * 9}])
tree("a key twice", dict_of(["a", "a", "b", "c", "d"]))
tree("keys that are equal", dict_of([1, True, 1.0, "c", "d"]))
tree("a key that is a dict", dict_of([{}, "b", "c", "d", "e"]))
tree("a key that holds a dict", dict_of([[[{"x": {}}]], "b", "c", "d", "e"]))
tree("a key that is nested deeply", dict_of([nested_key(300), "b", "c", "d", "e"]))
tree("a key that is nested too deeply", dict_of([nested_key(900), "b", "c", "d", "e"]))
tree("keys that cannot be sorted", dict_of([1, "b", None, [1, 2], 0.5]))
tree("huge numbers as keys", dict_of([2**64, -(2**64), 1e308, 10**300, 0]))
tree("a long key", dict_of(["x" * 4_000_000, "b", "c", "d", "e"]))
tree("keys with control characters", dict_of(["\0", "\x1b[2J", "\n", "\u202e", "../../x"]))
tree("a namedtuple", namedtuple("T", ["a", "b", "c", "d", "e"]))
tree("code for a name of a namedtuple", namedtuple("__import__('os').system('id')", ["a", "b", "c", "d", "e"]))
tree("code for a field of a namedtuple", namedtuple("T", ["a, b=__import__('os')", "b", "c", "d", "e"]))
tree("a namedtuple without a name", namedtuple("", ["a", "b", "c", "d", "e"]))
tree("a name that is no text", namedtuple(3, ["a", "b", "c", "d", "e"]))
tree("fields that Python reads as one", namedtuple("T", ["fi", "ﬁ", "c", "d", "e"]))
tree("a field that looks like a keyword", namedtuple("T", ["𝐝𝐞𝐟", "b", "c", "d", "e"]))  # noqa: RUF001
for field in ("class", "__debug__", "_a", "__class__", "", "a b", "1", "None", 1, None, ["a"], {}, "b", "self", "_cls"):
    tree(f"a field {field!r} of a namedtuple", namedtuple("T", [field, "b", "c", "d", "e"]))
tree("a thousand classes", classes(1000))
tree("a hundred thousand classes", classes(100_000))
for field in ("children", "keys", "type", "name"):
    for value in (None, "x", 3, [None], [[]], {}, [1.5]):
        tree(f"{field} is {value!r}", [ROOT | {field: value}])


def leaves_of(forged: Forged, count: int) -> None:
    forged.manifest["leaves"] = [{"name": "a", "kind": "numpy", "dtype": "bool"}] * count


@case
def a_million_leaves(forged: Forged) -> None:
    leaves_of(forged, 1_000_000)
    forged.manifest["tree"] = [{"type": "list", "children": list(range(1_000_000))}]
    forged.write()


@case
def thirty_thousand_leaves_in_the_depth(forged: Forged) -> None:
    leaves_of(forged, 30_000)
    forged.manifest["tree"] = chain(490, 30_000)
    forged.write()


@case
def ten_thousand_leaves_below_a_long_key(forged: Forged) -> None:
    leaves_of(forged, 10_000)
    inner = [{"type": "list", "children": list(range(10_000))}]
    forged.manifest["tree"] = [*inner, {"type": "dict", "keys": ["x" * 1_000_000], "children": [~0]}]
    forged.write()


@case
def a_namedtuple_of_very_many_fields(forged: Forged) -> None:
    leaves_of(forged, 100_000)
    fields = [f"f{number}" for number in range(100_000)]
    forged.manifest["tree"] = [
        {"type": "namedtuple", "name": "T", "keys": fields, "children": list(range(100_000))},
    ]
    forged.write()


@case
def very_many_keys_of_prngs(forged: Forged) -> None:
    forged.manifest["leaves"] = [
        {"name": "k", "kind": "key", "impl": "threefry2x32", "dtype": "uint32", "shape": [number, 2]}
        for number in range(30_000)
    ]
    forged.manifest["tree"] = [{"type": "list", "children": list(range(30_000))}]
    forged.write()


@case
def a_million_keys_that_are_empty_lists(forged: Forged) -> None:
    forged.manifest["tree"] = [{"type": "dict", "keys": [[]] * 1_000_000, "children": []}]
    forged.write()


@case
def deep_empty_nodes_side_by_side(forged: Forged) -> None:
    nodes: list[dict[str, Any]] = [{"type": "none"} for _ in range(100_000)]
    nodes.append({"type": "list", "children": [*range(5), *(~at for at in range(100_000))]})
    nodes += [{"type": "list", "children": [~at]} for at in range(100_000, 100_480)]
    forged.manifest["tree"] = nodes
    forged.write()


# Pieces and files


def piece(forged: Forged, **fields: Any) -> None:
    """Change fields of the first piece of `large`."""
    names = ("leaf", "start", "shape", "file", "offset", "hashes")
    for name, value in fields.items():
        forged.pieces("large")[0][names.index(name)] = value


NUMBERS: list[Any] = [-1, -(2**63), 1, 7, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, "0", None, True, []]
for number in NUMBERS:
    changed(f"offset {number!r}", lambda f, number=number: piece(f, offset=number))
    changed(f"file number {number!r}", lambda f, number=number: piece(f, file=number))
    changed(f"leaf number {number!r}", lambda f, number=number: piece(f, leaf=number))
    changed(f"bytes of a file {number!r}", lambda f, number=number: f.index["files"][0].update(nbytes=number))
    changed(f"bytes of an index {number!r}", lambda f, number=number: f.manifest["indexes"][0].update(nbytes=number))
    changed(f"format version {number!r}", lambda f, number=number: f.manifest.update(format_version=number))
for hashes in ([], ["0" * 32], ["0" * 31], ["0" * 32 + "\n"], ["A" * 32], ["0" * 32] * 1000, "0" * 32, [None], [0]):
    changed(f"hashes {str(hashes)[:20]} of {len(hashes)}", lambda f, hashes=hashes: piece(f, hashes=hashes))

changed("no pieces", lambda f: f.index.update(pieces=[]))
changed("no files", lambda f: f.index.update(files=[]))
changed("no indexes", lambda f: f.manifest.update(indexes=[]))
changed("pieces twice", lambda f: f.index["pieces"].extend(f.index["pieces"]))
changed("files twice", lambda f: f.index["files"].extend(f.index["files"]))
changed("the same index twice", lambda f: f.manifest["indexes"].extend(f.manifest["indexes"]))
changed("an index listed a thousand times", lambda f: f.manifest.update(indexes=f.manifest["indexes"] * 1000))
changed("two leaves on one region", lambda f: piece(f, file=f.pieces("small/a")[0][3], offset=0))
changed(
    "a file under two sizes", lambda f: f.index["files"].append(f.index["files"][0] | {"nbytes": 2**50, "hash": None})
)
changed("the hash of a zarr.json for data", lambda f: f.index["files"][0].update(hash="0" * 32))
changed(
    "thirty thousand index files that do not exist",
    lambda f: f.manifest.update(
        indexes=[{"name": f"i{number}", "nbytes": 9, "hash": "0" * 32} for number in range(30_000)]
    ),
)
changed(
    "thirty thousand files that do not exist",
    lambda f: f.index["files"].extend({"name": f"f{number}", "nbytes": 9} for number in range(30_000)),
)


def tiled(forged: Forged, shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> None:
    """One leaf of bytes, in the pieces that are given, all from one file that is as large."""
    nbytes = int(np.prod(shape))
    (forged.data / "tiles").write_bytes(bytes(nbytes))
    forged.index["files"].append({"name": "tiles", "nbytes": nbytes})
    number = len(forged.index["files"]) - 1
    forged.leaf("large").update(shape=shape, dtype="uint8", chunk=None)
    leaf = forged.manifest["leaves"].index(forged.leaf("large"))
    forged.index["pieces"] = [one for one in forged.index["pieces"] if one[0] != leaf]
    at = 0
    for start, size in boxes:
        held = int(np.prod(size))
        forged.index["pieces"].append([leaf, start, size, number, at, [forged_hash(held)]])
        at += held
    forged.write()


def forged_hash(nbytes: int) -> str:
    from jaxckpt import _manifest

    return _manifest.digest(bytes(nbytes))


def staircase(steps: int) -> list[tuple[list[int], list[int]]]:
    """Strips that have to be cut off a square one by one, each across the one before."""
    boxes, top, left, side = [], 0, 0, steps
    while side > 1:
        boxes += [([top, left], [1, side]), ([top + 1, left], [side - 1, 1])]
        top, left, side = top + 1, left + 1, side - 1
    return [*boxes, ([top, left], [1, 1])]


@case
def pieces_that_are_cut_off_one_by_one(forged: Forged) -> None:
    tiled(forged, [2000, 2000], staircase(2000))


@case
def pieces_that_no_straight_cut_takes_apart(forged: Forged) -> None:
    tiled(forged, [3, 3], [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])])


@case
def thirty_thousand_pieces_of_one_byte(forged: Forged) -> None:
    tiled(forged, [30_000], [([at], [1]) for at in range(30_000)])


@case
def thirty_thousand_pieces_in_the_same_place(forged: Forged) -> None:
    tiled(forged, [30_000], [([0], [1]) for _ in range(30_000)])


@case
def pieces_without_bytes(forged: Forged) -> None:
    leaf = forged.manifest["leaves"].index(forged.leaf("large"))
    forged.index["pieces"] += [[leaf, [0, 0], [0, 2**62], 0, 0, []]] * 30_000
    forged.write()


@case
def thirty_thousand_leaves_on_one_small_file(forged: Forged) -> None:
    count = 30_000
    forged.manifest["leaves"] = [{"name": "a", "kind": "numpy", "dtype": "uint8", "shape": [100_000]}] * count
    forged.manifest["tree"] = [{"type": "list", "children": list(range(count))}]
    (forged.data / "tiles").write_bytes(bytes(100_000))
    forged.index = {
        "files": [{"name": "tiles", "nbytes": 100_000}],
        "pieces": [[leaf, [0], [100_000], 0, 0, [forged_hash(100_000)]] for leaf in range(count)],
    }
    forged.write()


@case
def thirty_thousand_leaves_on_a_file_that_claims_to_be_large(forged: Forged) -> None:
    thirty_thousand_leaves_on_one_small_file(forged)
    forged.index["files"].append({"name": "none", "nbytes": 2**60})
    forged.index["files"][0]["nbytes"] = 2**60
    forged.write()


def holed(forged: Forged, nbytes: int, hashes: int) -> None:
    """One leaf on a file that is all hole."""
    with (forged.data / "hole").open("wb") as file:
        os.truncate(file.fileno(), nbytes)
    forged.index["files"].append({"name": "hole", "nbytes": nbytes})
    forged.leaf("small/a").update(shape=[nbytes])
    piece = forged.pieces("small/a")[0]
    piece[1:] = [[0], [nbytes], len(forged.index["files"]) - 1, 0, ["0" * 32] * hashes]
    forged.write()


@case
def a_gigabyte_that_is_a_hole(forged: Forged) -> None:
    holed(forged, 1 << 30, 1 << 6)


@case
def a_terabyte_that_is_a_hole_with_one_hash(forged: Forged) -> None:
    holed(forged, 1 << 40, 1)


@case
def an_exabyte_that_does_not_exist(forged: Forged) -> None:
    holed(forged, 0, 1)
    forged.index["files"][-1]["nbytes"] = 2**60
    forged.leaf("small/a").update(shape=[2**60])
    forged.pieces("small/a")[0][2] = [2**60]
    forged.write()


@case
def a_manifest_that_is_a_hole(forged: Forged) -> None:
    os.truncate(forged.path / "manifest.json", 1 << 40)


@case
def an_index_that_is_a_hole(forged: Forged) -> None:
    os.truncate(forged.data / "index-0.json", 1 << 40)
    forged.manifest["indexes"][0].update(nbytes=1 << 40)
    forged.write()


@case
def a_zarr_json_that_is_a_hole(forged: Forged) -> None:
    os.truncate(forged.data / "arrays" / "large" / "zarr.json", 1 << 40)
    next(file for file in forged.index["files"] if file["name"] == "arrays/large/zarr.json")["nbytes"] = 1 << 40
    forged.write()


# What stands in the place of files


def replace(path: Path, by: Callable[[Path], Any]) -> None:
    shutil.move(path, path.with_name(f"{path.name}.moved"))
    by(path)


def bomb(path: Path) -> None:
    path.write_bytes(gzip.compress(bytes(1 << 26)))


def zstd_bomb(path: Path) -> None:
    path.write_bytes(b"\x28\xb5\x2f\xfd\xa0\x00\x00\x00\x04" + b"\x02\x00\x10\x00" * 8192)


PLACES: dict[str, Callable[[Forged], Path]] = {
    "the manifest": lambda f: f.path / "manifest.json",
    "the index": lambda f: f.data / "index-0.json",
    "a chunk": lambda f: f.file("large"),
    "a pack": lambda f: f.file("small/a"),
    "a zarr.json": lambda f: f.data / "arrays" / "large" / "zarr.json",
    "the data directory": lambda f: f.data,
    "a directory of arrays": lambda f: f.data / "arrays" / "large",
}
SUBSTITUTES: dict[str, Callable[[Path], Any]] = {
    "a link to /etc/passwd": lambda path: path.symlink_to("/etc/passwd"),
    "a link to /etc": lambda path: path.symlink_to("/etc"),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to the real one": lambda path: path.symlink_to(path.with_name(f"{path.name}.moved")),
    "a link to itself": lambda path: path.symlink_to(path),
    "a fifo": lambda path: os.mkfifo(path),
    "a device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)),
    "a gzip bomb": bomb,
    "a zstd bomb": zstd_bomb,
    "a pickle": lambda path: path.write_bytes(b"cos\nsystem\n(S'id'\ntR."),
}
for place, of in PLACES.items():
    for substitute, by in SUBSTITUTES.items():
        CASES[f"{substitute} in place of {place}"] = lambda f, of=of, by=by: replace(of(f), by)


@case
def no_indexes_and_a_data_directory_that_is_a_link(forged: Forged) -> None:
    forged.manifest.update(indexes=[], leaves=[], tree=[{"type": "list"}])
    forged.write()
    shutil.rmtree(forged.data)
    forged.data.symlink_to("/etc")


# The text of the records

TOP = ["format_version", "attempt", "created", "versions", "tree", "leaves", "indexes", "timings"]
for field in TOP:
    changed(f"without {field}", lambda f, field=field: f.manifest.pop(field))
    for value in (None, "x", -1, 1.5, [], {}, [None], [[]], [{}], {"a": None}):
        changed(f"{field} is {value!r}", lambda f, field=field, value=value: f.manifest.update({field: value}))
changed("an unknown field", lambda f: f.manifest.update(unknown=1))
changed("an unknown field of a leaf", lambda f: f.leaf("large").update(unknown=1))
changed("an unknown field of the index", lambda f: f.index.update(unknown=1))
changed("another version in the future", lambda f: f.manifest.update(format_version=2))


def texts(body: bytes) -> dict[str, bytes]:
    """Malformed and unusual JSON, made from the good `body`."""
    deep = 200_000
    return {
        "nothing": b"",
        "half": body[: len(body) // 2],
        "NUL": bytes(100),
        "a byte order mark": b"\xef\xbb\xbf" + body,
        "UTF-16": body.decode().encode("utf-16"),
        "Latin-1": body.replace(b"text", b"t\xe9xt"),
        "a lone surrogate": body.replace(b"text", b"\\ud800"),
        "trailing text": body + b"{}",
        "comments": body.replace(b"{", b"{/* */", 1),
        "a key twice": b'{"format_version":1,' + body[1:],
        "another version twice": body[:-1] + b',"format_version":2}',
        "NaN": body.replace(b":1", b":NaN", 1),
        "Infinity": body.replace(b":1", b":Infinity", 1),
        "a huge float": body.replace(b":1", b":1e999", 1),
        "a long number": body.replace(b":1", b":" + b"1" * 100_000, 1),
        "a longer number": body.replace(b":1", b":1." + b"1" * 4_000_000, 1),
        "deep lists": body[:-1] + b',"x":' + b"[" * deep + b"]" * deep + b"}",
        "deep dicts": body[:-1] + b',"x":' + b'{"x":' * deep + b"1" + b"}" * deep + b"}",
        "only deep lists": b"[" * deep,
        "four million lists": body[:-1] + b',"x":[' + b"[]," * 4_000_000 + b"[]]}",
        "a long string": body[:-1] + b',"x":"' + b"x" * 16_000_000 + b'"}',
        "long escapes": body[:-1] + b',"x":"' + b"\\u0041" * 2_000_000 + b'"}',
        "blanks": b" " * 16_000_000 + body,
        "null": b"null",
        "a list": b"[]",
        "a number": b"1",
    }


TEXTS = list(texts(b'{"text":1}'))


def text_of_manifest(forged: Forged, name: str) -> None:
    forged.write(body=texts(msgspec.json.encode(forged.manifest))[name])


def text_of_envelope(forged: Forged, name: str) -> None:
    (forged.path / "manifest.json").write_bytes(texts(envelope_of(msgspec.json.encode(forged.manifest)))[name])


def text_of_index(forged: Forged, name: str) -> None:
    forged.write(index=texts(msgspec.json.encode(forged.index))[name])


for text in TEXTS:
    CASES[f"the manifest's text: {text}"] = lambda f, text=text: text_of_manifest(f, text)
    CASES[f"the envelope's text: {text}"] = lambda f, text=text: text_of_envelope(f, text)
    CASES[f"the index's text: {text}"] = lambda f, text=text: text_of_index(f, text)


# Running them


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "template"
    tree = hostile_child.plain_tree()
    options = SaveOptions(pack_below_bytes=64, chunk_bytes=4096)
    jaxckpt.save(path, tree | {"large": jnp.asarray(tree["large"])}, options=options)
    return path


class Child:
    """A process that opens what it is told to; a new one takes over where one dies or hangs."""

    def __init__(self, template: Path, mutant: str = "") -> None:
        self._template = template
        self._mutant = mutant
        self._of_array = (template / "zarr.json").exists()
        self._start()

    def _start(self) -> None:
        self._pipe, there = forked.Pipe()
        self._process = forked.start(hostile_child.examine, there, self._mutant)
        there.close()
        problems = [problem for _, problem in self.examine("", self._template, warm=True) if problem]
        assert not problems or self._mutant, "a sound checkpoint:\n" + "\n".join(problems)

    def examine(self, name: str, path: Path, *, warm: bool = False) -> Iterator[tuple[str, str]]:
        """How each operation ended, and what was wrong with that."""
        size = hostile_child.apparent_bytes(str(path))
        most_bytes = FACTORS.get(name, 10) * size + SLACK_BYTES
        most_seconds = SECONDS + SECONDS_PER_MIB * size / 2**20
        self._pipe.send((str(path), FEW.get(name, hostile_child.ARRAY if self._of_array else hostile_child.CHECKPOINT)))
        while True:
            try:
                answer = self._pipe.recv() if self._pipe.poll(HANG_SECONDS) else ("hang",)
            except EOFError:
                answer = ("abort",)
            if answer is None:
                return
            if len(answer) == 1:
                self._process.kill()
                self._start()
                yield answer[0], f"the process {answer[0]}s"
                return
            operation, outcome, seconds, nbytes, breaches = answer
            problems = [outcome] if outcome.startswith("fault") else []
            problems += [f"{seconds:.1f} s"] if seconds > most_seconds else []
            problems += (
                [f"{nbytes >> 20} MiB; allowed are {most_bytes >> 20}"] if nbytes > most_bytes and not warm else []
            )
            yield outcome.partition(":")[0], ", ".join(f"{operation}: {problem}" for problem in problems + breaches)

    def outcomes(self, name: str, path: Path, forge: Callable[[], Any]) -> list[tuple[str, str]]:
        """What `examine` finds when the template is copied to `path`, and forged there."""
        shutil.copytree(self._template, path)
        forge()
        found = list(self.examine(name, path))
        shutil.rmtree(path)
        return found

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(HANG_SECONDS)


@pytest.fixture
def child(template: Path) -> Iterator[Child]:
    child = Child(template)
    yield child
    child.close()


def summary(what: str, results: dict[str, list[tuple[str, str]]]) -> collections.Counter[str]:
    """Print how many ended how, and fail if anything was wrong."""
    outcomes = collections.Counter(outcome for found in results.values() for outcome, _ in found)
    print(f"{len(results)} forged {what}, {outcomes.total()} times opened: {dict(outcomes)}")
    problems = [f"{name}: {problem}" for name, found in results.items() for _, problem in found if problem]
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems)
    return outcomes


def test_what_is_forged_is_a_typed_error_or_harmless(tmp_path: Path, template: Path, child: Child) -> None:
    path = tmp_path / "forged"
    results = {
        name: child.outcomes(name, path, lambda forge=forge: forge(Forged(path))) for name, forge in CASES.items()
    }
    outcomes = summary("checkpoints", results)
    assert len(CASES) > 500
    assert outcomes["CorruptCheckpointError"] > 1000


@pytest.mark.parametrize(
    ("mutant", "name", "problem"),
    [
        ("follows links", "a link to /etc/passwd in place of a chunk", "open"),
        ("unpickles", "a pickle in place of the index", "pickle.find_class"),
        ("believes records", "thirty thousand leaves on one small file", "MiB"),
        ("does not look at trees", "tree: a child that comes later", "IndexError"),
    ],
)
def test_a_reader_that_trusts_is_caught(tmp_path: Path, template: Path, mutant: str, name: str, problem: str) -> None:
    """The mutants: what is asserted above notices each of them."""
    child = Child(template, mutant)
    path = tmp_path / "forged"
    problems = [problem for _, problem in child.outcomes(name, path, lambda: CASES[name](Forged(path)))]
    child.close()
    assert any(problem in found for found in problems), problems


def test_what_stands_in_the_place_of_an_arrays_files_is_a_typed_error(tmp_path: Path) -> None:
    template, path = tmp_path / "template", tmp_path / "forged"
    array = jnp.arange(96, dtype=jnp.int8).reshape(16, 6)
    asyncio.run(jaxckpt.async_serialize([array], [template]))
    child = Child(template)
    results = {}
    for name in os.listdir(template):
        for substitute, by in SUBSTITUTES.items():
            case = f"{substitute} in place of {name}"
            results[case] = child.outcomes(case, path, lambda name=name, by=by: replace(path / name, by))
        hole = f"a hole in place of {name}"
        results[hole] = child.outcomes(hole, path, lambda name=name: os.truncate(path / name, 1 << 40))
    child.close()
    outcomes = summary("arrays", results)
    assert outcomes["ok"] == 0
    assert outcomes.total() > 30


# Names

PARTS = [
    *("a\n", "é", "e\u0301", "A", "a", "con", "zarr.json", "c", "manifest.json", "arrays", "d-" + "0" * 32),
    *(".manifest.json." + "0" * 32, "-rf", "%2F", "*", "a:b", "C:\\x", "file:", "x.__lock", " ", "$HOME", ";", "🚀"),
    *("\udc80", "\ud800", "\0", "a\0b", "x" * 255, "x" * 256, "x" * 5000, "~x", "s3:", "a::b", "é" * 127, "é" * 128),
    "__metadata__",
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: ascii(part)[:30])
def test_a_hostile_path_is_taken_as_it_is_or_refused_before_anything_is_written(tmp_path: Path, part: str) -> None:
    (tmp_path / "root").mkdir()
    path, tree = f"{tmp_path}/root/{part}", {"w": np.arange(3), "n": 1}
    try:
        jaxckpt.save(path, tree)
    except (jaxckpt.CheckpointError, ValueError) as error:
        assert str(error)
        assert os.listdir(tmp_path / "root") == []
    else:
        assert os.listdir(tmp_path / "root") == [part]
        assert jaxckpt.restore(path)["n"] == 1
        assert jaxckpt.verify(path).ok
        jaxckpt.delete(path)
    assert os.listdir(tmp_path) == ["root"]


def test_no_name_makes_a_save_write_outside_of_its_checkpoint(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace, which shows the files that are written, is not installed")
    root, trace = tmp_path / "root" / "checkpoint", tmp_path / "trace"
    root.parent.mkdir()
    script = "import sys, hostile_child; hostile_child.save_names(sys.argv[1])"
    calls = "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat"
    watched = ["strace", "-f", "-qq", "-s", "20000", "-e", f"trace={calls}", "-o", trace]
    subprocess.run(
        [*watched, sys.executable, "-B", "-c", script, root],
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__), "TMPDIR": str(tmp_path)},
        check=True,
        timeout=300,
    )
    written = [
        name
        for line in trace.read_text(errors="replace").splitlines()
        if "openat" not in line or "O_WRONLY" in line or "O_RDWR" in line or "O_CREAT" in line
        for name in re.findall(r'"((?:[^"\\]|\\.)*)"', line)
    ]
    inside = [name for name in written if name == str(root) or name.startswith(f"{root}/")]
    outside = {name for name in written if name not in inside and not name.startswith(("/dev/", "/proc/"))}
    print(f"{len(hostile_child.NAMES)} names, {len(inside)} writes inside of the checkpoint, {len(outside)} outside")
    assert outside == set()
    assert not any(".." in name.split("/") for name in inside)
    assert len(inside) > 2 * len(hostile_child.NAMES)
    assert os.listdir(root.parent) == ["checkpoint"]
    found, tree = jaxckpt.restore(root), hostile_child.tree_of_names()
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(tree)))


# Fuzzing

SEED = 20261202


def fuzzed(
    kind: type[hostile_child.Target], path: Path, inputs: int, opened: int, mutant: str = ""
) -> tuple[collections.Counter[str], int, list[str]]:
    """How so many inputs ended, the memory they took, and what was wrong."""
    ours, there = forked.Pipe()
    process = forked.start(hostile_child.fuzz, there, kind, path, SEED, inputs, opened, mutant)
    there.close()
    problems = []
    while True:
        assert ours.poll(HANG_SECONDS), "the process hangs"
        answer = ours.recv()  # an EOFError is an abort
        if isinstance(answer, tuple):
            process.join(HANG_SECONDS)
            return *answer, problems
        problems += [answer] if answer else []


@pytest.mark.parametrize(
    ("kind", "mutant"),
    [(hostile_child.ManifestTarget, "does not look at trees"), (hostile_child.IndexTarget, "believes records")],
)
def test_a_reader_that_trusts_is_caught_by_the_fuzzer(
    tmp_path: Path, template: Path, kind: type[hostile_child.Target], mutant: str
) -> None:
    """The mutants of the fuzzer."""
    shutil.copytree(template, tmp_path / "fuzzed")
    _, _, problems = fuzzed(kind, tmp_path / "fuzzed", 4000, 400, mutant)
    print(f"mutant that {mutant}, seed {SEED}: {len(problems)} problems in 4000 inputs")
    assert len(problems) > 0


@pytest.mark.parametrize(
    ("kind", "inputs", "opened"),
    [
        (hostile_child.ManifestTarget, 55_000, 800),
        (hostile_child.IndexTarget, 30_000, 600),
        (hostile_child.ArrayIndexTarget, 10_000, 300),
        (hostile_child.ZarrTarget, 10_000, 300),
    ],
)
def test_mutated_records_are_typed_errors_or_harmless(
    tmp_path: Path, template: Path, kind: type[hostile_child.Target], inputs: int, opened: int, long: bool
) -> None:
    path = tmp_path / "fuzzed"
    if issubclass(kind, hostile_child.ArrayIndexTarget):
        array = jnp.arange(96, dtype=jnp.int8).reshape(16, 6)
        asyncio.run(jaxckpt.async_serialize([array], [path], options=SaveOptions(chunk_bytes=4096)))
    else:
        shutil.copytree(template, path)
    inputs, opened = (20 * inputs, 20 * opened) if long else (inputs, opened)
    tally, nbytes, problems = fuzzed(kind, path, inputs, opened)
    print(f"seed {SEED}, {inputs} inputs for {kind.__name__}: {dict(tally)}; {nbytes >> 20} MiB at most")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:20])
    assert sum(count for outcome, count in tally.items() if outcome.startswith("decode")) == inputs
    assert nbytes < SLACK_BYTES
