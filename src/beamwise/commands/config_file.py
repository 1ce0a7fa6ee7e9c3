"""Configuration files that strangers may have written, looked at before the parser does more with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from beamwise.decoding.errors import ConfigError

MAX_BYTES = 2**20
"""Longest configuration file."""
_MAX_DEPTH = 32
_MAX_VALUES = 20_000
"""Values in a file, aliases written out: a few lines of aliases to aliases stand for billions."""
_CLASSES = ("beamwise.", "lightning.pytorch.", "torch.optim.")
"""Where a file may take classes from (``class_path``): importing a module runs it."""


def check_configs(arguments: Sequence[str]) -> None:
    """Check each file that arguments give with ``--config``.

    Raises:
        ConfigError: see `check_config`.
    """
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if option in ("--config", "-c"):
            check_config(value)
        elif option.startswith("--config="):
            check_config(option.partition("=")[2])


def check_config(path: str) -> None:
    """Refuse a file that is not plain YAML of a sensible size.

    Raises:
        ConfigError: it cannot be read, is no regular file, too long, no YAML in UTF-8, nested too deeply, blown up by
            aliases, or wants classes from other packages than Beamwise trains with.
    """
    where = f"--config '{path}'"
    try:
        file = Path(path)
        if file.exists() and not file.is_file():
            raise ConfigError(f"{where} is no regular file: give a YAML file")
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{where} is longer than {MAX_BYTES} bytes: give a YAML file of options")
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}): give a YAML file") from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:  # a ConfigError is a ValueError too
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is no YAML in UTF-8: {error}") from error
    level, values = [content], 0
    for _ in range(_MAX_DEPTH):
        values += len(level)
        for one in level:
            if isinstance(one, dict):
                _check_keys(one, where)
            if isinstance(one, str) and "\0" in one:
                raise ConfigError(f"{where} has a null character in {one[:40]!r}: no option takes one")
        level = [child for one in level for child in _children(one, _MAX_VALUES)]
        if values + len(level) > _MAX_VALUES:
            raise ConfigError(f"{where} has more than {_MAX_VALUES} values, aliases written out: write it plainly")
        if not level:
            return
    raise ConfigError(f"{where} is nested deeper than {_MAX_DEPTH} levels: write it plainly")


def _children(value: Any, most: int) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())[:most]
    return list(value)[:most] if isinstance(value, list | set | tuple) else []


def _check_keys(mapping: dict[Any, Any], where: str) -> None:
    for key, value in mapping.items():
        if not isinstance(key, str) or "\0" in key:
            raise ConfigError(f"{where} has the key {key!r}: keys are names of options")
        if key == "class_path" and not (isinstance(value, str) and value.startswith(_CLASSES)):
            short = repr(value)[:80] if isinstance(value, str) else type(value).__name__
            raise ConfigError(f"{where} has class_path {short}: classes come from {', '.join(_CLASSES)} only")
