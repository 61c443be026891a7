"""A path or URL -> the storage behind it."""

import os
import re
from collections.abc import Mapping
from typing import Any

from jaxckpt import _objects
from jaxckpt._local import LocalLocation
from jaxckpt._objects import ObjectLocation

PathLike = str | os.PathLike[str]
Location = LocalLocation | ObjectLocation
"""A directory, or the objects of a store below a prefix. Both have the same methods, with the same meaning."""

_SCHEMES = ("a local path", "file://", *(f"{scheme}://" for scheme in _objects.SCHEMES))


def parse(path: PathLike, storage_options: Mapping[str, Any] | None = None) -> Location:
    """The storage that `path` names: a local path, absolute or relative, `~` expanded, or a URL.

    Raises:
        TypeError: Not a str or PathLike.
        ValueError: Empty, or of a scheme that is not supported; lists those that are. Or
            `storage_options` has an option that this storage does not know.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the path is {path!r} of type {type(path).__name__}; expected a str, a PathLike or a URL")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"the path is {text!r}; expected text, not bytes")
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "file", text
    if not rest or "\0" in text or not _is_unicode(text):
        raise ValueError(f"{text!r} is not a path")
    if collapsed := re.match(r"(s3|gs|memory):/(?!/)", text):
        raise ValueError(f"{text}: a Path makes {collapsed[1]}:/ of {collapsed[1]}://; pass the URL as a str")
    if scheme in _objects.SCHEMES:
        return _objects.parse(scheme, rest, storage_options or {})
    if scheme != "file":
        raise ValueError(f"{text}: scheme {scheme!r} is not supported; expected {', '.join(_SCHEMES)}")
    if storage_options:
        raise ValueError(f"{text} is on a local disk, which has no storage options ({', '.join(storage_options)})")
    return _local(rest)


def _local(path: str) -> LocalLocation:
    path = os.path.abspath(os.path.expanduser(path))
    if "\\" in path:
        # TensorStore 0.1.86 takes it for a slash, and would write the data elsewhere.
        raise ValueError(f"{path!r} has a backslash, which TensorStore cannot write to")
    return LocalLocation(path)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
