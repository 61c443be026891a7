"""A pytree <-> leaves with paths and names, and the structure as records. Pure."""

import collections
import itertools
import keyword
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.core import Tracer
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from jaxckpt._errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt._manifest import Node, digest, is_stored_dtype

Path = tuple[Any, ...]
"""The keys that lead to a leaf, types kept: what leaves are matched and named by."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_AWKWARD = re.compile(r"(?:(?i:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?|zarr\.json|.*\.|.*\.__lock)")
_LONGEST_COMPONENT = 150
_LONGEST_NAME = 600
_DEEPEST = 500
_MOST_CLASSES = 1000


@dataclass(frozen=True, slots=True)
class Flat:
    """A pytree taken apart: its leaves, the path to each, and what is needed to describe it.

    `ends` are the paths to the leaves and to what is empty, in order; an empty one is
    marked. They are where the keys of children without leaves are known from.
    """

    leaves: list[Any]
    paths: list[Path]
    ends: list[tuple[Path, bool]]
    treedef: Any


class _Inner(msgspec.Struct, frozen=True, gc=False):
    """Where an inner node is: under which key of which other one."""

    parent: "_Inner | None"
    key: Any
    depth: int

    def path(self) -> Path:
        keys, at = [], self
        while at.parent is not None:
            keys.append(at.key)
            at = at.parent
        return tuple(reversed(keys))


def flatten(tree: Any) -> Flat:
    """Take `tree` apart in JAX's order of leaves. None is structure, not a leaf.

    Raises:
        UnsupportedLeafError: It is nested too deeply, or two leaves have the same path.
    """
    _check_depth(tree)
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)[0]
    treedef = jax.tree_util.tree_structure(tree)
    ends = [(tuple(map(_key, entries)), _is_empty(leaf)) for entries, leaf in pairs]
    paths = [path for path, empty in ends if not empty]
    if sum(map(len, paths)) > _most_keys(len(paths)):
        raise UnsupportedLeafError(f"the tree is nested too deeply for its {len(paths)} leaves; flatten it first")
    if len(set(paths)) != len(paths):
        twice = next(path for path, count in collections.Counter(paths).items() if count > 1)
        raise UnsupportedLeafError(
            f"two leaves have the path {display(twice)}: a registered node gives two children one key"
        )
    return Flat([leaf for _, leaf in pairs if not _is_empty(leaf)], paths, ends, treedef)


def display(path: Path) -> str:
    """The path for messages, long keys cut."""
    keys = [text if len(text) <= _LONGEST_COMPONENT else f"{text[:_LONGEST_COMPONENT]}..." for text in map(str, path)]
    return "/".join(keys) if path else "(the tree itself is one leaf)"


def kind_of(leaf: Any, path: Path) -> str:
    """What `leaf` is (see `Leaf.kind`).

    Raises:
        UnsupportedLeafError: A checkpoint cannot hold it; names the leaf and its type.
    """
    match leaf:
        case Tracer():
            raise UnsupportedLeafError(f"leaf {display(path)} is being traced; save outside of jit, grad and vmap")
        case jax.Array():
            if leaf.is_deleted():
                raise UnsupportedLeafError(f"leaf {display(path)} was deleted or donated before the save began")
            return "key" if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else "array"
        case np.ma.MaskedArray():
            raise UnsupportedLeafError(
                f"leaf {display(path)} is a masked array; save its data and its mask as two leaves"
            )
        case np.ndarray() | np.generic():
            if not is_stored_dtype(leaf.dtype):
                raise UnsupportedLeafError(
                    f"leaf {display(path)} has dtype {leaf.dtype!r}; expected a number or bool in native byte order"
                )
            return "numpy" if isinstance(leaf, np.ndarray) else "scalar"
        case bool() | int() | float() | complex() | str() if type(leaf) in (bool, int, float, complex, str):
            if isinstance(leaf, str):
                _check_text(leaf, path)
            return "value"
        case _:
            raise UnsupportedLeafError(
                f"leaf {display(path)} is of type {type(leaf).__module__}.{type(leaf).__qualname__}; expected a JAX or "
                "numpy array, a PRNG key, or a Python int, float, complex, bool or str. Remove it from the tree "
                "(equinox.filter(tree, equinox.is_array) does), or register its type as a pytree node"
            )


def nodes(flat: Flat) -> list[Node]:
    """The structure as records, children before parents, the root last.

    Raises:
        UnsupportedLeafError: A dict key is of a type that JSON cannot keep.
    """
    found: list[Node] = []
    ends = iter(flat.ends)
    leaves = itertools.count()
    path, is_empty = next(ends, ((), False))

    def visit(treedef: Any, depth: int) -> int:
        """Describe a subtree; `path` is that of the first end which has not been passed."""
        nonlocal path, is_empty
        node_data = treedef.node_data()
        children, keys = [], []
        for child in treedef.children():
            before = path
            children.append(visit(child, depth + 1))
            keys.append(before[depth] if path is not before else None)
        if not children and len(path) == depth and (is_empty or node_data is None):
            path, is_empty = next(ends, ((), False))
        if node_data is None:
            return next(leaves)
        found.append(_node(node_data, keys, children))
        return ~(len(found) - 1)

    visit(flat.treedef, 0)
    return found


def paths(tree: list[Node], count: int, where: str) -> list[Path]:
    """The path of each of `count` leaves, from the records of the structure, which are checked.

    Raises:
        CorruptCheckpointError: The records are not one tree that uses every leaf once.
    """
    if not tree:
        if count != 1:
            raise CorruptCheckpointError(f"{where}: {count} leaves, but no tree")
        return [()]
    found: dict[int, Path] = {}
    # Of inner nodes only the parent and the key: whole paths of many deep ones would fill the memory.
    inner: dict[int, _Inner] = {len(tree) - 1: _Inner(None, None, 0)}
    room = _most_keys(count)
    for number in reversed(range(len(tree))):
        node, inside = tree[number], inner.pop(number, None)
        keys = _child_keys(node, where)
        if inside is None or len(keys) != len(node.children) or inside.depth > _DEEPEST:
            raise CorruptCheckpointError(f"{where}: the tree is not well formed at node {number}")
        own = sum(child >= 0 for child in node.children)
        room -= own * (inside.depth + 1)
        if room < 0:
            raise CorruptCheckpointError(f"{where}: the tree is too deep for its {count} leaves")
        base = inside.path() if own else ()
        for key, child in zip(keys, node.children, strict=True):
            if (child in found or child >= count) if child >= 0 else (~child in inner or ~child >= number):
                raise CorruptCheckpointError(f"{where}: the tree is not well formed at node {number}")
            if child >= 0:
                found[child] = (*base, key)
            else:
                inner[~child] = _Inner(inside, key, inside.depth + 1)
    if len(found) != count:
        raise CorruptCheckpointError(f"{where}: the tree has {len(found)} leaves; expected {count}")
    return [found[leaf] for leaf in range(count)]


def unflatten(tree: list[Node], leaves: Sequence[Any], where: str) -> Any:
    """Build the tree that `nodes` described: dicts, lists, tuples and namedtuples.

    A namedtuple gets a new class of the same name and fields, another registered node
    becomes a dict of its fields: no code is imported by a name in a file.
    """
    if not tree:
        return leaves[0]
    built: list[Any] = []
    try:
        _check_classes(tree)
        for node in tree:
            built.append(_build(node, [leaves[c] if c >= 0 else built[~c] for c in node.children]))
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"{where}: the tree is not well formed ({error})") from error
    return built[-1]


def names(leaf_paths: Sequence[Path]) -> list[str]:
    """A distinct name for each path, safe as a relative path on any file system.

    Names that differ only by case, or are long, are told apart by a hash of the path.
    """
    plain = [_name(path) for path in leaf_paths]
    seen = collections.Counter(name.casefold() for name in plain)
    return [
        name if seen[name.casefold()] == 1 else f"{name}~{_hash(path)}"
        for name, path in zip(plain, leaf_paths, strict=True)
    ]


def _name(path: Path) -> str:
    components = [_component(str(key)) for key in path]
    name = "/".join(components) or "leaf"
    if len(name) > _LONGEST_NAME or any(len(c) > _LONGEST_COMPONENT for c in components):
        return f"{name[:60].replace('/', '.').rstrip('%.')}~{_hash(path)}"
    return name


@lru_cache(maxsize=65536)
def _component(key: str) -> str:
    if not key:
        return "%"
    text = _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), key)
    if not _AWKWARD.fullmatch(text):
        return text
    if text.endswith("."):
        return text[:-1] + "%2E"
    if text.endswith(".__lock") or text == "zarr.json":
        head, _, tail = text.rpartition(".")
        return f"{head}%2E{tail}"
    return f"%{ord(text[0]):02X}{text[1:]}"


def _hash(path: Path) -> str:
    return digest(msgspec.json.encode(path))


def _check_depth(tree: Any) -> None:
    """Refuse what would exhaust the stack: JAX leaves the thread unusable when that happens inside of it."""
    pending = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        if depth > _DEEPEST:
            raise UnsupportedLeafError(f"the tree is nested too deeply: more than {_DEEPEST} levels; flatten it first")
        if isinstance(node, dict | list | tuple):
            children = node.values() if isinstance(node, dict) else node
            pending.extend((child, depth + 1) for child in children if isinstance(child, dict | list | tuple))


def _most_keys(count: int) -> int:
    """How long the paths of `count` leaves may be together: they must not need much more memory than the leaves."""
    return (4 << 20) + 16 * count


def _is_empty(node: Any) -> bool:
    """Whether `node` is structure without children."""
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def _key(entry: Any) -> Any:
    match entry:
        case DictKey(key) | FlattenedIndexKey(key):
            return key if _is_plain(key) else str(key)
        case SequenceKey(index):
            return index
        case GetAttrKey(name):
            return name
        case _:
            return str(entry)


def _is_plain(key: Any) -> bool:
    """Whether JSON keeps the key: itself, or as a list where it is a tuple."""
    if type(key) is tuple:
        return all(map(_is_plain, key))
    return type(key) in (str, int, bool, type(None)) or (type(key) is float and math.isfinite(key))


def _check_text(text: str, path: Path) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedLeafError(
            f"leaf {display(path)}: the text {text!r} has a lone surrogate, which no file can hold"
        ) from None


def _node(node_data: Any, keys: list[Any], children: list[int]) -> Node:
    if node_data is None:
        return Node(type="none")
    kind: Any = node_data[0]
    data = node_data[1]
    if kind is type(None):
        return Node(type="none")
    if kind is list:
        return Node(type="list", children=children)
    if kind is tuple:
        return Node(type="tuple", children=children)
    if _is_namedtuple(kind):
        return Node(type="namedtuple", name=kind.__name__, keys=list(kind._fields), children=children)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        dict_keys = data[1] if kind is collections.defaultdict else data
        return Node(type="dict", keys=[_plain_key(key) for key in dict_keys], children=children)
    fields = [position if key is None else _listed_key(key) for position, key in enumerate(keys)]
    return Node(type="object", name=f"{kind.__module__}.{kind.__qualname__}", keys=fields, children=children)


def _is_namedtuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _plain_key(key: Any) -> Any:
    """A dict key as JSON keeps it."""
    if type(key) is tuple:
        return [_plain_key(part) for part in key]
    if not _is_plain(key):
        raise UnsupportedLeafError(
            f"the dict key {key!r} is of type {type(key).__qualname__}; expected str, int, "
            "a finite float, bool, None or a tuple of them"
        )
    return _listed_key(key)


def _listed_key(key: Any) -> Any:
    if isinstance(key, str):
        _check_text(key, (key,))
    return [_listed_key(part) for part in key] if isinstance(key, tuple) else key


def _tuple_key(key: Any) -> Any:
    return tuple(_tuple_key(part) for part in key) if isinstance(key, list) else key


def _build(node: Node, values: list[Any]) -> Any:
    match node.type:
        case "none":
            return None
        case "list":
            return values
        case "tuple":
            return tuple(values)
        case "namedtuple":
            return _namedtuple(node.name or "", tuple(node.keys))(*values)
        case "dict" | "object":
            return {_tuple_key(key): value for key, value in zip(node.keys, values, strict=True)}


def _check_classes(tree: list[Node]) -> None:
    """Making a class takes a hundred times the time and memory of its record."""
    classes = {(node.name, *node.keys) for node in tree if node.type == "namedtuple"}
    if len(classes) > _MOST_CLASSES or sum(map(len, classes)) > 32 * _MOST_CLASSES:
        raise ValueError(f"{len(classes)} classes of namedtuples are more than are made anew; restore it with `like`")


@lru_cache(maxsize=256)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    if not all(isinstance(f, str) and _is_identifier(f) for f in (name, *fields)):
        raise ValueError(f"{name!r} is not a namedtuple")
    made = collections.namedtuple(name, fields, rename=True)
    if made._fields != fields:
        raise ValueError(f"{fields} are not the fields of a namedtuple")
    return made


def _is_identifier(text: str) -> bool:
    # Of names that Python spells otherwise two may be the same, a SyntaxError.
    is_normal = text.isascii() or unicodedata.is_normalized("NFKC", text)
    return text.isidentifier() and not keyword.iskeyword(text) and is_normal


def _child_keys(node: Node, where: str) -> list[Any]:
    if node.type in ("list", "tuple"):
        return list(range(len(node.children)))
    try:
        keys = [_tuple_key(key) for key in node.keys]
        twice = len(set(keys)) != len(keys)
    except (TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where}: a {node.type} has a key that none can have") from error
    if twice:
        raise CorruptCheckpointError(f"{where}: a {node.type} has a key twice")
    return keys
