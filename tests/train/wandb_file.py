"""Reads what an offline wandb run wrote: protobuf records in LevelDB's log format, after a header of 7 bytes."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32768, 7
_FULL, _LAST = 1, 4
_PATIENCE_SECONDS = 30.0


def read_run(folder: Path) -> list[wandb_internal_pb2.Record]:
    """All records of the one finished offline run under ``folder/wandb``.

    wandb's own process flushes the file a few milliseconds after ``finish`` has returned: wait for the exit record.
    """
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        records = _records(path)
        if any(record.HasField("exit") for record in records):
            return records
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has no exit record after {_PATIENCE_SECONDS:.0f} s: was the run finished?")
        time.sleep(0.01)


def _records(path: Path) -> list[wandb_internal_pb2.Record]:
    records = []
    for data in _payloads(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    return records


def _payloads(raw: bytes) -> Iterator[bytes]:
    if len(raw) < _HEADER:  # nothing flushed yet
        return
    assert raw[:4] == b":W&B"
    place, parts = _HEADER, b""
    while place + _HEADER <= len(raw):
        if _BLOCK - place % _BLOCK < _HEADER:  # padding at a block's end
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + _HEADER])
        if place + _HEADER + length > len(raw):  # half flushed
            return
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
