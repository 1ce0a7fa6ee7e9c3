"""Output files of the commands: refused early where they cannot be written, and there only once they are complete."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from beamwise.decoding.errors import ConfigError


def check_writable(out: str | None, option: str = "--out") -> None:
    """Refuse an output file that could not be written, before the work is done.

    Args:
        out: the file.
        option: that named it.

    Raises:
        ConfigError: its folder does not exist or may not be written to, or it is a folder itself.
    """
    if out is None:
        return
    path = Path(out)
    if path.is_dir():
        raise ConfigError(f"{option} '{out}' is a folder: give a file name inside it")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} '{out}': the folder '{path.parent}' does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} '{out}': the folder '{path.parent}' may not be written to; choose another")


@contextmanager
def open_output(out: str | None) -> Iterator[TextIO]:
    """A file that appears under its name only when it is complete; None is stdout."""
    if out is None:
        yield sys.stdout
        return
    path = Path(out)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        with scratch.open("x", encoding="utf-8") as file:
            yield file
        scratch.rename(path)
    finally:
        scratch.unlink(missing_ok=True)
