"""Controllers on disk: saved and loaded bit by bit; whatever is wrong with a folder is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from beamwise.controller import checkpoint
from beamwise.controller.checkpoint import Controller
from beamwise.controller.info import ControllerInfo
from beamwise.controller.latency import LatencyProfile
from beamwise.controller.predictor import PredictorConfig, WidthPredictor
from beamwise.decoding.errors import ConfigError, FormatError, ModelError
from beamwise.decoding.features import FEATURE_NAMES

PROFILE = LatencyProfile((1, 64), (20.0, 60.0), (3.0, 6.0))


def make_controller(profile: LatencyProfile | None = PROFILE) -> Controller:
    torch.manual_seed(0)
    network = WidthPredictor(PredictorConfig(max_width=2, hidden=4))
    network.full.scale.fill_(0.8)
    models = {"target": "big", "draft": "small"}
    return Controller(
        network, ControllerInfo(network.config, profile, models, [1, 2], metrics={"nll": 0.5}, training={"steps": 3})
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_controller().save_pretrained(tmp_path / "controller")
    return tmp_path / "controller"


def rewrite(folder: Path, redigest: bool, **changes: Any) -> None:
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    if redigest:
        raw["digest"] = checkpoint._digest(raw)
    path.write_text(json.dumps(raw))


def test_round_trip(folder: Path) -> None:
    loaded, original = Controller.from_pretrained(folder), make_controller()
    features = torch.randn(5, len(FEATURE_NAMES))
    assert torch.equal(loaded.network(features), original.network(features))
    assert loaded.info == original.info
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert "Beamwise" in (folder / "README.md").read_text()
    assert loaded.policy(max_gamma=3).max_gamma == 3
    original.save_pretrained(folder)  # over the old one
    assert Controller.from_pretrained(folder).info == original.info


def test_a_profile_is_needed(tmp_path: Path) -> None:
    make_controller(None).save_pretrained(tmp_path)
    loaded = Controller.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no latency profile"):
        loaded.policy()
    assert loaded.policy(PROFILE).profile == PROFILE


def test_profiles_by_dtype(tmp_path: Path) -> None:
    controller = make_controller()
    half, single = (replace(PROFILE, dtype=dtype, block_ms=ms) for dtype, ms in (("bfloat16", 1.0), ("float32", 2.0)))
    for profile in (single, half, single):
        controller.add_profile(profile)
    controller.save_pretrained(tmp_path)
    loaded = Controller.from_pretrained(tmp_path)
    assert loaded.info == controller.info
    assert len(loaded.info.other_profiles) == 2
    chosen = {dtype: loaded.policy(dtype=dtype).profile for dtype in ("bfloat16", "float32", "float16", "")}
    assert chosen == {"bfloat16": half, "float32": single, "float16": PROFILE, "": PROFILE}
    assert loaded.policy(half, dtype="float32").profile == half


def test_a_policy_goes_no_further_than_the_traces_went() -> None:
    controller = make_controller()
    controller.info.max_gamma, controller.info.max_draft_width, controller.info.num_beams = 3, 16, [1]
    policy = controller.policy()
    assert policy.max_gamma == 3
    assert policy.draft_widths[-1] == 16
    with pytest.raises(ConfigError, match="learned from at most 1"):
        policy.start_block(2)
    assert controller.policy(max_gamma=2).max_gamma == 2


def test_tampered_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=r"model.safetensors' was changed or damaged"):
        Controller.from_pretrained(folder)


@pytest.mark.parametrize("change", [{"num_beams": [1]}, {"profile": None}, {"weights_sha256": "0"}])
def test_tampered_config(folder: Path, change: dict[str, Any]) -> None:
    rewrite(folder, redigest=False, **change)
    with pytest.raises(FormatError, match=r"config.json' was changed or damaged"):
        Controller.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "beamwise-draft"}, "not a Beamwise controller"),
        ({"version": 2}, "format version 2"),
        ({"schema": "0" * 16, "schema_version": 9}, r"feature schema 0{16} \(version 9\)"),
        ({"predictor": {"max_width": 3, "edges": [1, 2], "hidden": 4}}, "does not hold the controller"),
        ({"predictor": {}}, "does not hold the controller"),
        ({"colour": 1}, "does not hold the controller"),
    ],
)
def test_foreign_and_newer(folder: Path, change: dict[str, Any], message: str) -> None:
    rewrite(folder, redigest=True, **change)
    with pytest.raises(FormatError, match=message):
        Controller.from_pretrained(folder)


def test_not_finite_weights(tmp_path: Path) -> None:
    controller = make_controller()
    controller.network.full.shift.fill_(float("nan"))
    controller.save_pretrained(tmp_path)
    with pytest.raises(FormatError, match="not finite"):
        Controller.from_pretrained(tmp_path)


def test_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="does not hold the controller"):
        Controller.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(FormatError, match="cannot be read"):
        Controller.from_pretrained(folder)
    with pytest.raises(FormatError, match="cannot be read"):
        Controller.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["nobody/nothing", "/no/such/folder", "not an id"])
def test_missing(name: str) -> None:
    with pytest.raises(ModelError, match="There is no controller"):
        Controller.from_pretrained(name, local_files_only=True)


def test_other_models_are_refused() -> None:
    controller = make_controller()
    controller.check_models({"target": "big", "drafter": "unknown to it"})
    with pytest.raises(ModelError, match="trained with the draft 'small', not 'tiny'"):
        controller.check_models({"draft": "tiny"})
