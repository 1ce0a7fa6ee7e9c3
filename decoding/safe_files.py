"""Reading files that strangers may have written: regular files inside their folder, of bounded size, and plain JSON."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import FormatError

if TYPE_CHECKING:
    import torch

MAX_JSON_BYTES = 256 * 2**20
"""Longest JSON file of ours; a manifest of a million prompts has a tenth of this."""
MAX_JSON_DEPTH = 64
"""Deepest nesting: far beyond what Beamwise writes, far below what exhausts Python's stack."""


def inside(folder: str | os.PathLike[str], name: str, max_bytes: int | None = None) -> Path:
    """The path of a regular file of a folder, links followed.

    Links may point to where the same folder holds them, or into the ``blobs`` of the Hugging Face cache around it.

    Args:
        folder: whatever it is, the user named it; links to it are followed.
        name: of the file, as it was found in a file of the folder.
        max_bytes: longest file accepted; None takes any.

    Raises:
        FormatError: the name leads out of the folder (``..``, absolute, a link), or the file is no regular one (a pipe,
            a device, a folder), or too long.
        FileNotFoundError: there is no such file.
    """
    home = Path(folder).resolve()
    where = f"'{folder}/{name}'"
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise FormatError(f"{where} leads out of its folder: names of files inside it are accepted only")
    try:
        path = (home / name).resolve(strict=True)
        status = path.stat()
    except (RuntimeError, NotADirectoryError) as error:  # links in a circle, a file in place of a folder
        raise FormatError(f"{where} is no regular file: put the file itself there") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise FormatError(f"{where} cannot be read ({error.strerror}): put a readable file there") from error
    homes = [home]
    if home.parent.name == "snapshots":  # the Hub's cache: snapshots/REVISION/NAME links to blobs/HASH
        homes.append(home.parent.parent / "blobs")
    if not any(path.is_relative_to(one) for one in homes):
        raise FormatError(f"{where} is a link out of its folder: put the file itself there")
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{where} is no regular file: put the file itself there")
    if max_bytes is not None and status.st_size > max_bytes:
        raise FormatError(f"{where} has {status.st_size} bytes, more than the {max_bytes} of any that Beamwise writes")
    return path


def parse_json(text: str | bytes) -> Any:
    """JSON of bounded depth whose texts can be written as UTF-8.

    Raises:
        ValueError: it is malformed, too deeply nested, or has half a surrogate pair.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            break
    else:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
    json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def read_json(folder: str | os.PathLike[str], name: str) -> Any:
    """The value in a JSON file of a folder.

    Raises:
        FormatError: see `inside`.
        OSError: it cannot be read.
        ValueError: it is no JSON; see `parse_json`.
    """
    return parse_json(inside(folder, name, MAX_JSON_BYTES).read_bytes())


def read_tensors(folder: str | os.PathLike[str], name: str, max_bytes: int | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file of a folder: floating-point ones finite, the others integers.

    Safetensors itself refuses headers that do not fit the file.

    Raises:
        FormatError: see `inside`; or the file is damaged, or holds values that are not finite, or complex numbers.
    """
    import torch  # not at the top: the command line's help waits for no library
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, torch.Tensor] = load_file(inside(folder, name, max_bytes))
    except (OSError, SafetensorError) as error:
        raise FormatError(f"'{folder}/{name}' cannot be read: {error}") from error
    for key, tensor in tensors.items():
        if tensor.is_complex() or (tensor.is_floating_point() and not torch.isfinite(tensor.float()).all()):
            raise FormatError(f"'{folder}/{name}' holds values that are not finite real numbers in '{key}'")
    return tensors


def check_types(kind: type, raw: dict[str, Any]) -> None:
    """Compare values from JSON with the type hints of a dataclass; names that it lacks are passed over.

    Raises:
        TypeError: a value is of another type, a number not finite, or an integer beyond 64 bits.
    """
    hints = get_type_hints(kind)
    for name, value in raw.items():
        if name in hints and not _conforms(value, hints[name]):
            raise TypeError(f"'{name}' is not of the type {getattr(hints[name], '__name__', hints[name])}")


def _conforms(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(_conforms(value, arg) for arg in args)
    if origin is list:
        return isinstance(value, list) and all(_conforms(one, args[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_conforms(one, args[1]) for one in value.values())
    if hint is NoneType:
        return value is None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint)
