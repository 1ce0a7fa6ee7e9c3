"""Reads what an offline wandb run wrote: protobuf records in LevelDB's log format, after a header of 7 bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32768, 7
_FULL, _LAST = 1, 4


def read_run(folder: Path) -> list[wandb_internal_pb2.Record]:
    """All records of the one offline run under ``folder/wandb``."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = []
    for data in _payloads(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    return records


def _payloads(raw: bytes) -> Iterator[bytes]:
    assert raw[:4] == b":W&B"
    place, parts = _HEADER, b""
    while place + _HEADER <= len(raw):
        if _BLOCK - place % _BLOCK < _HEADER:  # padding at a block's end
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + _HEADER])
        parts += raw[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


def item_names(items: object) -> set[str]:
    """Keys of history, summary or config items, nested ones joined by dots."""
    return {".".join(item.nested_key) or item.key for item in items}  # type: ignore[attr-defined]


def config_names(records: list[wandb_internal_pb2.Record]) -> set[str]:
    """Keys of a run's configuration, given at its start or later."""
    names: set[str] = set()
    for record in records:
        names |= item_names(record.run.config.update) | item_names(record.config.update)
    return names
