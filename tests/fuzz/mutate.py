"""Mutations: of bytes, of JSON values, of files in a folder. Everything is drawn from a `random.Random`."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

WORDS = ("", " ", "\0", "../../../etc/passwd", "/etc/passwd", "/dev/zero", "..", ".", "\ud800", "\u2028", "NaN", "null")
STRANGE: tuple[Any, ...] = (
    *WORDS,
    *(None, True, False, -1, 0, 1, 0.5, 2**31, 2**63, -(2**64), 10**30, 1e308, -1e308),
    *(float("nan"), float("inf"), -float("inf"), [], {}, [[]], [None], {"": {}}, "x" * 10_000, list(range(300))),
)
"""Values that break what expects others."""
TOKENS = (b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"{", b"}", b"[" * 3000, b'"', b"\n", b",", b":", b"9" * 5000, b"1e999")


def mutate_bytes(rng: random.Random, data: bytes, most: int = 6) -> bytes:
    """Flip, cut, double and insert, up to ``most`` times."""
    out = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 1, 2, 4, 8, 64)))
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                del out[at:end]
            case 3:
                out[at:at] = out[at:end]
            case 4:
                out[at:at] = rng.choice(TOKENS)
            case _:
                if rng.random() < 0.2:
                    del out[at:]
    return bytes(out)


def mutate_json(rng: random.Random, value: Any, most: int = 3) -> Any:
    """A copy with up to ``most`` nodes replaced, removed, doubled or added."""
    root = {"root": copy.deepcopy(value)}
    for _ in range(rng.randint(1, most)):
        places = [(node, key) for node, key in _places(root) if node is not root or rng.random() < 0.05]
        if not places:
            return rng.choice(STRANGE)
        node, key = rng.choice(places)
        match rng.randrange(8):
            case 0 if node is not root:
                del node[key]
            case 1 if isinstance(node, list):
                node.insert(key, copy.deepcopy(node[key]))
            case 2 if isinstance(node, dict):
                node[rng.choice(WORDS[1:])] = rng.choice(STRANGE)
            case 3 if isinstance(node[key], int | float):
                node[key] = rng.choice((-node[key], node[key] + 1, node[key] * 1000, float(node[key]), str(node[key])))
            case 4:
                node[key] = _nest(rng.choice((10, 63, 500)), node[key], rng.random() < 0.5)
            case _:
                node[key] = copy.deepcopy(rng.choice(STRANGE))
    return root["root"]


def _places(node: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [node]
    while waiting and len(found) < 5000:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(min(len(one), 50)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            waiting.append(one[key])
    return found


def _nest(depth: int, value: Any, lists: bool) -> Any:
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def mutate_file(rng: random.Random, path: Path, outside: Path) -> None:
    """Put something else in a file's place: a link, a pipe, a folder, nothing.

    Args:
        rng: draws what.
        path: the file.
        outside: a readable file of another folder.
    """
    kind = rng.choice(("gone", "empty", "link", "chain", "loop", "device", "pipe", "folder"))
    saved = path.read_bytes()
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "link":  # out of the folder, to the very same bytes
        outside.write_bytes(saved)
        path.symlink_to(outside)
    elif kind == "chain":
        (path.parent / "step").symlink_to(outside)
        path.symlink_to("step")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to(rng.choice(("/dev/zero", "/dev/random", "/proc/self/mem", "/dev/stdin")))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()


def dumps(value: Any) -> bytes:
    """JSON as strangers write it: NaN and half surrogates included."""
    try:
        return json.dumps(value).encode()
    except (ValueError, TypeError, RecursionError):
        return b'{"a":' * 2000


def fresh_copy(source: Path, target: Path) -> Path:
    """A folder made anew from another."""
    if target.exists():
        shutil.rmtree(target)
    return Path(shutil.copytree(source, target, symlinks=True))
