"""The data files that people have <-> trees: `.safetensors`, `.npz` and `.npy`.

A file of named arrays is a flat dict: its names are the keys, whatever they look like.
A tree is written under the names of its key paths, joined by `/`.

The `__metadata__` of a `.safetensors` file (texts by name) is the entry `__metadata__`
of that dict, present only when the file has one. The format reserves this name, so no
tensor can bear it.

Nothing here unpickles: arrays of Python objects are refused, read or written.
"""

import errno
import importlib
import math
import os
import tokenize
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt._errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedLeafError,
)

Array = np.ndarray[Any, Any]

METADATA = "__metadata__"
_BARE_ARRAY = "arr_0"  # what numpy.savez calls an array without a name

_SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def read_source(path: str | os.PathLike[str]) -> Any:
    """Return what the file at `path` holds as a tree of numpy arrays.

    Arrays of `.safetensors` and `.npy` are read-only views of the mapped file: bytes are
    read when they are used, and the file must stay unchanged for as long as they live.
    Those of `.npz` are read into memory.

    Args:
        path: A `.safetensors` or `.npz` file, which gives a dict of arrays by name (see
            the module for `__metadata__`), or a `.npy` file, which gives one array.

    Raises:
        CheckpointError: The suffix is unknown, or the `safetensors` package is missing.
        CorruptCheckpointError: The file is not of the format that its suffix says.
        UnsupportedLeafError: An array is of Python objects, or of a dtype that numpy lacks.
        OSError: The file cannot be opened.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".safetensors":
            return _read_safetensors(path)
        case ".npz":
            return _read_npz(path)
        case ".npy":
            return _read_npy(path)
        case _:
            return _refuse_suffix(path)


def check_dest(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Raise what `write_dest` would refuse, without looking at the values of arrays.

    `tree` may hold arrays that have only a shape and a dtype worth knowing, so that a
    restore that cannot be written is refused before its bytes are read.
    """
    path = Path(path)
    _check_place(path, overwrite)
    _check_format(path, _flatten(tree))


def write_dest(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Write `tree` to the file at `path`, whole or not at all.

    It is written under a temporary name beside `path`, fsynced and renamed, so a crash
    leaves the old file or the new one, and a reader sees one of them. A tree that the
    format cannot hold is refused before anything is written, except that metadata (see
    the module) is left out of `.npz` and `.npy` with a warning.

    Args:
        path: Ends in `.safetensors` or `.npz`, which hold arrays by name, or in `.npy`,
            which holds one array.
        tree: Of JAX or numpy arrays; Python numbers become 0-d arrays. A dict of arrays
            keeps its keys; other trees are named by key paths such as `params/kernel`;
            a bare array is called `arr_0`.
        overwrite: Replace the file at `path`, which is refused otherwise.

    Raises:
        CheckpointError: The suffix is unknown, or the `safetensors` package is missing.
        CheckpointExistsError: There is a file at `path`, and `overwrite` is not set.
        UnsupportedLeafError: A leaf or its name does not fit the format.
        StorageError: The file cannot be written.
    """
    path = Path(path)
    _check_place(path, overwrite)
    flat = _flatten(tree)
    _check_format(path, flat)
    if flat.metadata and path.suffix.lower() != ".safetensors":
        names = ", ".join(flat.metadata)
        warnings.warn(f"{path} cannot hold the file metadata ({names}): left out", stacklevel=2)
    with _published(path) as temporary:
        match path.suffix.lower():
            case ".safetensors":
                _write_safetensors(temporary, flat)
            case ".npz":
                _write_npz(temporary, flat)
            case _:
                [array] = flat.arrays.values()
                with temporary.open("xb") as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


@dataclass(frozen=True, slots=True)
class _Flat:
    """A tree as a file holds it: arrays by name, and the metadata of a `.safetensors` file."""

    arrays: dict[str, Array]
    metadata: dict[str, str]


def _flatten(tree: Any) -> _Flat:
    metadata: dict[str, str] = {}
    if isinstance(tree, dict) and _is_metadata(tree.get(METADATA)):
        metadata = tree[METADATA]
        tree = {key: value for key, value in tree.items() if key != METADATA}
    arrays: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") if path else _BARE_ARRAY
        if name in arrays:
            raise UnsupportedLeafError(
                f"two leaves are named {name!r} in a file of arrays by name; rename one of their keys"
            )
        arrays[name] = _host_array(name, leaf)
    return _Flat(arrays, metadata)


def _is_metadata(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for item in value.items() for text in item)


def _host_array(name: str, leaf: Any) -> Array:
    match leaf:
        case jax.Array() | jax.ShapeDtypeStruct() if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UnsupportedLeafError(
                f"leaf {name!r} is a PRNG key, which a file of arrays cannot hold; "
                "restore in Python, and save its jax.random.key_data instead"
            )
        case jax.Array() | np.ndarray() | np.generic() | bool() | int() | float() | complex():
            return np.asarray(leaf)
        case _:
            raise UnsupportedLeafError(
                f"leaf {name!r} is of type {type(leaf).__name__}, which a file of arrays cannot hold; "
                "restore in Python, and leave it out"
            )


def _check_place(path: Path, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise StorageError(errno.ENOENT, f"cannot write {path}: {path.parent} is not a directory")
    if path.is_dir():
        raise CheckpointExistsError(f"{path} is a directory; name a file")
    if path.exists() and not overwrite:
        raise CheckpointExistsError(f"{path} exists; choose another name, or overwrite it (--overwrite)")


def _check_format(path: Path, flat: _Flat) -> None:
    match path.suffix.lower():
        case ".safetensors":
            _safetensors()
            _check_dtypes(path, flat, _is_safetensors_dtype)
            if METADATA in flat.arrays:
                raise UnsupportedLeafError(f"leaf {METADATA!r} has a name that .safetensors reserves; rename its key")
        case ".npz":
            _check_dtypes(path, flat, _is_npy_dtype)
            _check_npz_names(flat)
        case ".npy":
            if len(flat.arrays) != 1:
                raise UnsupportedLeafError(
                    f"{path} can hold one array, and the tree has {len(flat.arrays)}; write .npz or .safetensors"
                )
            _check_dtypes(path, flat, _is_npy_dtype)
        case _:
            _refuse_suffix(path)


def _check_dtypes(path: Path, flat: _Flat, is_held: Callable[[np.dtype[Any]], bool]) -> None:
    for name, array in flat.arrays.items():
        if not is_held(array.dtype):
            raise UnsupportedLeafError(
                f"leaf {name!r} has dtype {array.dtype}, which {path.suffix} cannot hold; "
                "restore in Python, and convert it or view it as unsigned integers"
            )


def _is_safetensors_dtype(dtype: np.dtype[Any]) -> bool:
    return dtype.name in _SAFETENSORS_DTYPES.values()


def _is_npy_dtype(dtype: np.dtype[Any]) -> bool:
    # The .npy header spells bfloat16 and its kin as raw bytes ('V2'), and they would come back as such.
    return issubclass(dtype.type, (np.number, np.bool_))


def _check_npz_names(flat: _Flat) -> None:
    for name in flat.arrays:
        if "\0" in name:
            raise UnsupportedLeafError(f"leaf {name!r}: .npz cannot hold a NUL in a name; rename its key")
        if name.endswith(".npy") and name.removesuffix(".npy") in flat.arrays:
            raise UnsupportedLeafError(
                f"leaf {name!r}: numpy.load takes it for {name.removesuffix('.npy')!r}; rename one of their keys"
            )


def _read_safetensors(path: Path) -> dict[str, Any]:
    safetensors = _safetensors()
    with path.open("rb") as header:
        start = 8 + int.from_bytes(header.read(8), "little")
    # safe_open checks that the tensors fill the rest of the file, without holes.
    with _understood(str(path), safetensors.SafetensorError), safetensors.safe_open(path, framework="numpy") as file:
        metadata: dict[str, str] | None = file.metadata()
        views = [(name, file.get_slice(name)) for name in file.offset_keys()]
        entries: list[tuple[str, str, list[int]]] = [(name, v.get_dtype(), v.get_shape()) for name, v in views]
    mapped: Array = np.memmap(path, mode="r").view(np.ndarray)
    tree: dict[str, Any] = {METADATA: metadata} if metadata else {}
    for name, code, shape in entries:
        if code not in _SAFETENSORS_DTYPES:
            known = ", ".join(_SAFETENSORS_DTYPES)
            raise UnsupportedLeafError(f"{path}: tensor {name!r} has dtype {code}; expected one of {known}")
        dtype = np.dtype(_SAFETENSORS_DTYPES[code])
        stop = start + math.prod(shape) * dtype.itemsize
        tree[name] = mapped[start:stop].view(dtype).reshape(shape)
        start = stop
    return tree


def _write_safetensors(path: Path, flat: _Flat) -> None:
    safetensors = _safetensors()
    # safetensors writes the buffer of a strided array as it lies, without an error.
    dense = {name: np.asarray(array, order="C") for name, array in flat.arrays.items()}
    try:
        safetensors.numpy.save_file(dense, path, metadata=flat.metadata or None)
    except safetensors.SafetensorError as error:
        raise StorageError(str(error)) from error


def _read_npy(path: Path) -> Array:
    with _understood(str(path)):
        with path.open("rb") as file:
            _refuse_objects(file, str(path))
        return np.lib.format.open_memmap(path, mode="r").view(np.ndarray)


def _refuse_objects(file: IO[bytes], what: str) -> None:
    """Look at the `.npy` header that `file` begins with, and go back to its beginning."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    if read_header(file)[2].hasobject:
        raise UnsupportedLeafError(
            f"{what} holds Python objects, which only unpickling could read; save its numbers as arrays of numbers"
        )
    file.seek(0)


def _read_npz(path: Path) -> dict[str, Array]:
    with _understood(str(path)):
        archive = zipfile.ZipFile(path)
    tree: dict[str, Array] = {}
    with archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            with _understood(f"{path}: array {name!r}"), archive.open(member) as file:
                _refuse_objects(file, f"{path}: array {name!r}")
                tree[name] = np.lib.format.read_array(file, allow_pickle=False)
    return tree


def _write_npz(path: Path, flat: _Flat) -> None:
    # numpy.savez takes names as keyword arguments, where `file` and `allow_pickle` are its own.
    with zipfile.ZipFile(path, "x", allowZip64=True) as archive:
        for name, array in flat.arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _safetensors() -> Any:
    try:
        importlib.import_module("safetensors.numpy")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise CheckpointError(
            "reading and writing .safetensors takes the safetensors package: pip install 'jaxckpt[safetensors]'"
        ) from error


def _refuse_suffix(path: Path) -> NoReturn:
    raise CheckpointError(f"{path}: the suffix {path.suffix!r} is unknown; expected .safetensors, .npz or .npy")


@contextmanager
def _understood(what: str, *errors: type[Exception]) -> Generator[None]:
    """Raise what a reader makes of a bad file as an error of ours that says which file."""
    # numpy parses the header of an array as Python, hence the errors of a parser.
    bad = (ValueError, EOFError, RuntimeError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error)
    try:
        yield
    except (*bad, *errors) as error:
        raise CorruptCheckpointError(f"{what} cannot be read: {error}") from error
    except OSError as error:
        if error.filename:
            raise
        raise StorageError(error.errno, f"{what} cannot be read: {error.strerror}") from error


@contextmanager
def _published(path: Path) -> Generator[Path]:
    """A new name beside `path`; the file written there becomes `path`, durably, when the block ends."""
    temporary = path.with_name(f".jaxckpt-{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        _fsync(temporary)
        temporary.replace(path)
        _fsync(path.parent)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise StorageError(error.errno, message) if error.errno else StorageError(message) from error
    finally:
        temporary.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
