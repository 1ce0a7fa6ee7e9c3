"""Traces: what is written is read back, kills lose and double nothing, damage is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from beamwise.decoding.errors import ConfigError, FormatError
from beamwise.decoding.features import FEATURE_NAMES, schema_hash
from beamwise.decoding.trace import TraceWriter, check_traces, read_blocks, read_layers
from beamwise.decoding.trace_schema import MANIFEST, BlockRow, LayerRow, read_manifest

CONFIG = {"target": "tiny", "num_beams": [2], "seed": 0}


def layer_row(block: int = 0, layer: int = 0, seed: int = 0, **changes: object) -> LayerRow:
    features = torch.randn(len(FEATURE_NAMES), generator=torch.Generator().manual_seed(seed))
    values = {
        "block": block,
        "layer": layer,
        "position": 3 * block,
        "num_beams": 2,
        "width": 2,
        "draft_width": 8,
        "drafted": 8,
        "reached": True,
        "covered": True,
        "features": features,
        "candidates_needed": [1, 5],
    }
    return LayerRow(**{**values, **changes})  # type: ignore[arg-type]


def block_row(block: int = 0) -> BlockRow:
    return BlockRow(block, 3 * block, 2, 2, 3, 2, 16, 18, 40, 0, 0.01, 0.02, 0.003)


def rows_of(prompt: int) -> tuple[list[LayerRow], list[BlockRow]]:
    count = 1 + prompt % 3
    layers = [layer_row(block, layer, 100 * prompt + 10 * block + layer) for block in range(count) for layer in (0, 1)]
    return layers, [block_row(block) for block in range(count)]


def write(folder: Path, prompts: range, group: int = 2) -> None:
    with TraceWriter(folder, "run", CONFIG, prompts_per_shard=group) as writer:
        for prompt in prompts:
            if str(prompt) not in writer.done_prompts():
                writer.add_prompt(str(prompt), *rows_of(prompt))


def contents(folder: Path) -> list[dict[str, object]]:
    return [row for batch in read_layers(folder) for row in batch.to_pylist()]


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    found = contents(tmp_path)
    expected = [(str(prompt), row) for prompt in range(3) for row in rows_of(prompt)[0]]
    assert [(row["prompt"], row["block"], row["layer"]) for row in found] == [
        (prompt, row.block, row.layer) for prompt, row in expected
    ]
    for row, (_, wanted) in zip(found, expected, strict=True):
        assert torch.equal(torch.tensor(row["features"]), wanted.features)
        assert row["candidates_needed"] == [1, 5]
        assert row["accept_prob"] is None
        assert row["run"] == "run"
    blocks = [row for batch in read_blocks(tmp_path) for row in batch.to_pylist()]
    assert len(blocks) == 1 + 2 + 3
    assert blocks[0]["target_s"] == pytest.approx(0.02)
    assert check_traces(tmp_path).schema == schema_hash()


def test_columns_and_batches(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    batches = list(read_layers(tmp_path, columns=["prompt", "layer"], batch_size=3))
    assert max(batch.num_rows for batch in batches) <= 3
    assert batches[0].schema.names == ["prompt", "layer"]
    with pytest.raises(ConfigError, match="no column 'colour'"):
        next(read_layers(tmp_path, columns=["colour"]))


def test_long_and_unreached_rows(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "run", CONFIG) as writer:
        unreached = layer_row(0, 1, reached=False, covered=False, candidates_needed=[])
        writer.add_prompt("a", [layer_row(accept_prob=[0.5, 0.25]), unreached], [block_row()])
        writer.add_prompt("nothing drafted", [], [block_row()])
    found = contents(tmp_path)
    assert found[0]["accept_prob"] == [0.5, 0.25]
    assert found[1]["candidates_needed"] == []
    assert writer.rows == 2


@pytest.mark.parametrize("killed_after", [1, 2, 3, 4, 5])
def test_a_killed_run_loses_and_doubles_nothing(tmp_path: Path, killed_after: int) -> None:
    writer = TraceWriter(tmp_path / "killed", "run", CONFIG, prompts_per_shard=2)
    for prompt in range(killed_after):
        writer.add_prompt(str(prompt), *rows_of(prompt))
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert len(writer.done_prompts()) == killed_after - killed_after % 2
    write(tmp_path / "killed", range(6))
    write(tmp_path / "whole", range(6))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_killed_between_the_files_and_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(2))

    real_replace = Path.replace

    def die_at_the_manifest(self: Path, target: Path) -> Path:
        if target.name == MANIFEST:
            raise KeyboardInterrupt
        return real_replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die_at_the_manifest)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, range(4))
    (tmp_path / "layers" / "000001.parquet").write_bytes(b"half a shard")  # nobody reads what the manifest lacks
    assert len(contents(tmp_path)) == 2 + 4
    write(tmp_path, range(4))
    assert len(contents(tmp_path)) == 2 + 4 + 6 + 2


def test_other_settings_are_refused(tmp_path: Path) -> None:
    write(tmp_path, range(1))
    with pytest.raises(ConfigError, match="other settings"):
        TraceWriter(tmp_path, "run", {**CONFIG, "seed": 1})
    with pytest.raises(ConfigError, match="other settings"):
        TraceWriter(tmp_path, "another", CONFIG)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "run", CONFIG), pytest.raises(ConfigError, match="Another process"):
        TraceWriter(tmp_path, "run", CONFIG)
    TraceWriter(tmp_path, "run", CONFIG).close()


def test_a_prompt_comes_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "run", CONFIG) as writer:
        writer.add_prompt("a", [], [])
        with pytest.raises(ConfigError, match="'a' is in"):
            writer.add_prompt("a", [], [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": torch.zeros(3)}, "features have shape"),
        ({"candidates_needed": [1]}, "1 entries, not 2"),
        ({"candidates_needed": [1, 9]}, "exceeds the 8 drafted"),
    ],
)
def test_rows_that_contradict_themselves(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with TraceWriter(tmp_path, "run", CONFIG) as writer, pytest.raises(ConfigError, match=message):
        writer.add_prompt("a", [layer_row(**changes)], [])


def test_a_half_written_shard_is_seen(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    path = tmp_path / "layers" / "000001.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FormatError, match=r"000001.parquet' is not what its manifest says"):
        contents(tmp_path)


def test_a_damaged_shard_is_seen(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    path = tmp_path / "layers" / "000000.parquet"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(FormatError, match="damaged or half written"):
        contents(tmp_path)


def test_a_missing_shard_is_seen(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    (tmp_path / "blocks" / "000000.parquet").unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        check_traces(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a manifest of Beamwise traces"),
        ({"version": 99}, "format version 99"),
        ({"schema": "feedfeedfeedfeed"}, "feature schema feedfeedfeedfeed"),
        ({"colour": 1}, "wrong fields"),
    ],
)
def test_foreign_and_newer_folders(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write(tmp_path, range(1))
    path = tmp_path / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FormatError, match=message):
        read_manifest(tmp_path)
    path.write_text("{")
    with pytest.raises(FormatError, match="cannot be read"):
        read_manifest(tmp_path)
    path.unlink()
    with pytest.raises(FormatError, match="holds no traces"):
        contents(tmp_path)
