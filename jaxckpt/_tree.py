"""A pytree <-> leaves with paths and names, and the structure as records. Pure."""

import collections
import keyword
import re
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

Path = tuple[str, ...]
"""The keys that lead to a leaf, each as text: what leaves are matched and named by."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_AWKWARD = re.compile(r"(?:(?i:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?|zarr\.json|.*\.|.*\.__lock)")
_LONGEST_COMPONENT = 150
_LONGEST_NAME = 600
_DEEPEST = 1000


@dataclass(frozen=True, slots=True)
class Flat:
    """A pytree taken apart: its leaves, the path to each, and what is needed to describe it."""

    leaves: list[Any]
    paths: list[Path]
    keys: list[tuple[Any, ...]]
    treedef: Any


def flatten(tree: Any) -> Flat:
    """Take `tree` apart in JAX's order of leaves. None is structure, not a leaf."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = [tuple(_key(entry) for entry in entries) for entries, _ in pairs]
    return Flat([leaf for _, leaf in pairs], [tuple(map(str, path)) for path in keys], keys, treedef)


def display(path: Path) -> str:
    """The path for messages."""
    return "/".join(path) if path else "(the tree itself is one leaf)"


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
        case str():
            _check_text(leaf, path)
            return "value"
        case bool() | int() | float() | complex():
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

    def visit(treedef: Any, first: int, depth: int) -> int:
        node_data = treedef.node_data()
        if node_data is None and treedef.num_leaves == 1:
            return first
        children, keys, at = [], [], first
        for child in treedef.children():
            has_leaf = child.num_leaves > 0
            keys.append(flat.keys[at][depth] if has_leaf else None)
            children.append(visit(child, at, depth + 1))
            at += child.num_leaves
        found.append(_node(node_data, keys, children))
        return ~(len(found) - 1)

    try:
        visit(flat.treedef, 0, 0)
    except RecursionError:
        raise UnsupportedLeafError("the tree is nested too deeply to be saved; flatten it first") from None
    return found


def paths(tree: list[Node], count: int, where: str) -> list[Path]:
    """The path of each of `count` leaves, from the records of the structure, which are checked.

    Raises:
        CorruptCheckpointError: The records are not one tree that uses every leaf once.
    """
    found: dict[int, Path] = {}
    inner: dict[int, Path] = {len(tree) - 1: ()}
    for number in reversed(range(len(tree))):
        node, base = tree[number], inner.get(number)
        keys = _child_keys(node)
        if base is None or len(keys) != len(node.children) or len(base) > _DEEPEST:
            raise CorruptCheckpointError(f"{where}: the tree is not well formed at node {number}")
        for key, child in zip(keys, node.children, strict=True):
            paths_of, child = (found, child) if child >= 0 else (inner, ~child)
            if child in paths_of or child >= (count if paths_of is found else number):
                raise CorruptCheckpointError(f"{where}: the tree is not well formed at node {number}")
            paths_of[child] = (*base, key)
    if not tree and count == 1:
        return [()]
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
    components = [_component(key) for key in path]
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


def _key(entry: Any) -> Any:
    match entry:
        case DictKey(key) | FlattenedIndexKey(key):
            return key
        case SequenceKey(index):
            return index
        case GetAttrKey(name):
            return name
        case _:
            return str(entry)


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
    fields = [str(position) if key is None else str(key) for position, key in enumerate(keys)]
    return Node(type="object", name=f"{kind.__module__}.{kind.__qualname__}", keys=fields, children=children)


def _is_namedtuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _plain_key(key: Any) -> Any:
    if type(key) is tuple:
        return [_plain_key(part) for part in key]
    if type(key) is str:
        _check_text(key, (key,))
        return key
    if type(key) in (int, bool, type(None)) or (type(key) is float and np.isfinite(key)):
        return key
    raise UnsupportedLeafError(
        f"the dict key {key!r} is of type {type(key).__qualname__}; expected str, int, "
        "a finite float, bool, None or a tuple of them"
    )


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
            built = {_tuple_key(key): value for key, value in zip(node.keys, values, strict=True)}
            if len(built) != len(values):
                raise ValueError("a key stands twice")
            return built


@lru_cache(maxsize=256)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    if not all(isinstance(f, str) and f.isidentifier() and not keyword.iskeyword(f) for f in (name, *fields)):
        raise ValueError(f"{name!r} is not a namedtuple")
    return collections.namedtuple(name, fields)


def _child_keys(node: Node) -> list[str]:
    if node.type in ("list", "tuple"):
        return [str(position) for position in range(len(node.children))]
    return [str(_tuple_key(key)) for key in node.keys]
