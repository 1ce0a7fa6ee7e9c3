"""The rows of one prompt as Arrow tables of the trace's schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch

from .errors import ConfigError
from .features import FEATURE_NAMES
from .trace_schema import BLOCK_SCHEMA, LAYER_SCHEMA, BlockRow, LayerRow


def prompt_tables(
    run: str, prompt: str, layer_rows: Sequence[LayerRow], block_rows: Sequence[BlockRow]
) -> tuple[pa.Table, pa.Table]:
    """Layer table and block table of a prompt.

    Args:
        run: name of the run.
        prompt: its id.
        layer_rows: its drafted layers.
        block_rows: its blocks.

    Raises:
        ConfigError: a row contradicts itself.
    """
    for row in layer_rows:
        _check_row(prompt, row)
    return _layer_table(run, prompt, layer_rows), _block_table(run, prompt, block_rows)


def _check_row(prompt: str, row: LayerRow) -> None:
    where = f"Prompt '{prompt}', block {row.block}, layer {row.layer}"
    if tuple(row.features.shape) != (len(FEATURE_NAMES),):
        raise ConfigError(f"{where}: features have shape {tuple(row.features.shape)}, not ({len(FEATURE_NAMES)},)")
    wanted = row.num_beams if row.reached else 0
    if len(row.candidates_needed) != wanted:
        raise ConfigError(f"{where}: candidates_needed has {len(row.candidates_needed)} entries, not {wanted}")
    if any(not 0 <= needed <= row.drafted for needed in row.candidates_needed):
        raise ConfigError(f"{where}: candidates_needed {list(row.candidates_needed)} exceeds the {row.drafted} drafted")


def _layer_table(run: str, prompt: str, rows: Sequence[LayerRow]) -> pa.Table:
    columns: dict[str, Any] = {"run": [run] * len(rows), "prompt": [prompt] * len(rows)}
    for name in LAYER_SCHEMA.names[2:]:
        columns[name] = [getattr(row, name) for row in rows]
    width = len(FEATURE_NAMES)
    stacked = torch.stack([row.features for row in rows]) if rows else torch.zeros(0, width)
    flat = pa.array(stacked.to("cpu", torch.float32).reshape(-1).numpy())
    columns["features"] = pa.FixedSizeListArray.from_arrays(flat, width)
    return pa.table(columns, schema=LAYER_SCHEMA)


def _block_table(run: str, prompt: str, rows: Sequence[BlockRow]) -> pa.Table:
    columns: dict[str, Any] = {"run": [run] * len(rows), "prompt": [prompt] * len(rows)}
    for name in BLOCK_SCHEMA.names[2:]:
        columns[name] = [getattr(row, name) for row in rows]
    return pa.table(columns, schema=BLOCK_SCHEMA)
