"""``beamwise train fit`` from end to end: what it learns, what it leaves behind, what wandb wrote."""

from __future__ import annotations

import json
from argparse import ArgumentError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
import yaml

from beamwise.controller.checkpoint import Controller
from beamwise.decoding.errors import ConfigError, InputError
from beamwise.train.baselines import observed_cells
from beamwise.train.cli import train_main
from beamwise.train.module import ControllerModule
from beamwise.train.report import LEARNED, PRIOR, predict_cells
from beamwise.train.rows import TraceSource
from beamwise.train.scores import calibration_error

from .conftest import ROOT
from .synthetic import SyntheticWorld
from .wandb_file import config_names, item_names, read_run


@pytest.fixture(scope="module")
def report(trained: Path) -> dict[str, Any]:
    return json.loads((trained / "report.json").read_text())


def test_learns_more_than_the_simple_baselines(report: dict[str, Any]) -> None:
    scores = report["scores"]
    assert scores[LEARNED]["nll"] < scores["logistic regression"]["nll"] < scores["base rate"]["nll"]
    assert scores[LEARNED]["auroc"] > scores["logistic regression"]["auroc"]
    assert scores[LEARNED]["nll"] < scores[PRIOR]["nll"] < scores["base rate"]["nll"]


def test_probabilities_are_those_of_the_world(trained: Path, traces: Path) -> None:
    """Against the truth, not against draws: no bias, and close row by row."""
    network = Controller.from_pretrained(trained).network
    rows = TraceSource([str(traces)], (0.15, 0.2), 0, 10**6).load("test")
    cells = observed_cells(rows, network.config)
    truth = SyntheticWorld().true_probs(rows.features, 4).numpy()[cells.row, cells.width - 1, cells.column]
    found = predict_cells(network, rows, cells)
    assert abs(float(found.mean() - truth.mean())) < 0.03
    assert float(np.abs(found - truth).mean()) < 0.1
    assert calibration_error(found, cells.label) < 0.05


def test_important_features_are_found(report: dict[str, Any]) -> None:
    ranked = sorted(report["importance"], key=lambda name: -report["importance"][name])
    assert set(ranked[:3]) == {"recent_acceptance", "draft_entropy", "joint_mass_8"}


def test_the_controller_says_what_it_is(trained: Path, report: dict[str, Any]) -> None:
    info = Controller.from_pretrained(trained).info
    assert info.num_beams == [1, 2, 4]
    assert (info.max_draft_width, info.max_gamma) == (64, 3)
    assert info.models == {"target": "none"}
    assert info.metrics == report
    assert info.profile is not None
    assert info.training["steps"] > 0


def test_files_left_behind(trained: Path) -> None:
    plots = {path.name for path in (trained / "plots").glob("*.png")}
    assert plots == {"reliability.png", "roc.png", "acceptance.png", "importance.png"}
    assert "gradient boosting" in (trained / "report.md").read_text()
    training = yaml.safe_load((trained / "training" / "config.yaml").read_text())
    assert training["trainer"]["max_epochs"] == 10


def test_wandb_has_it_all(trained: Path) -> None:
    records = read_run(trained / "training")
    keys = set().union(*(item_names(record.history.item) for record in records if record.HasField("history")))
    assert {"train/nll", "val/nll", "val/auroc_w1", "val/brier_w4", "val/ece_w2", "train/learning_rate"} <= keys
    assert {"held_out/nll", "held_out/ece", "plots/reliability.filenames", "plots/roc.filenames"} <= keys
    config = config_names(records)
    assert {"learning_rate", "traces"} <= config
    artifacts = [record.artifact for record in records if record.HasField("artifact")]
    artifacts += [r.request.log_artifact.artifact for r in records if r.request.HasField("log_artifact")]
    (artifact,) = [item for item in artifacts if item.type == "model"]
    assert {entry.path for entry in artifact.manifest.contents} == {"config.json", "model.safetensors", "report.md"}


def test_refused_traces_leave_no_run_behind(tmp_path: Path) -> None:
    """The next run of this process would be written into it."""
    SyntheticWorld(seed=1).write(tmp_path / "few", prompts=1)
    arguments = ["fit", "--config", str(ROOT / "configs" / "train.yaml"), "--data.traces", str(tmp_path / "few")]
    with pytest.raises(InputError, match="no layers for the"):
        train_main([*arguments, "--out", str(tmp_path / "out"), "--trainer.accelerator", "cpu"])
    assert wandb.run is None
    assert not list(tmp_path.rglob("*.wandb"))


def test_resumes_from_a_checkpoint(trained: Path, traces: Path, tmp_path: Path) -> None:
    last = trained / "training" / "checkpoints" / "last.ckpt"
    done = torch.load(last, weights_only=True)["global_step"]
    arguments = ["fit", "--config", str(ROOT / "configs" / "train.yaml"), "--data.traces", str(traces)]
    arguments += ["--out", str(tmp_path), "--model.max_width", "4", "--trainer.max_epochs", "11"]
    arguments += ["--trainer.logger", "false", "--trainer.accelerator", "cpu", "--ckpt_path", str(last)]
    train_main([*arguments, "--trainer.enable_progress_bar", "false"])
    steps = Controller.from_pretrained(tmp_path).info.training["steps"]
    assert steps == done * 11 // 10


def test_more_beams_than_the_predictor_serves(traces: Path, tmp_path: Path) -> None:
    arguments = ["fit", "--data.traces", str(traces), "--out", str(tmp_path), "--model.max_width", "2"]
    arguments += ["--trainer.logger", "false", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    with pytest.raises(ConfigError, match=r"--model.max_width 4"):
        train_main(arguments)


@pytest.mark.parametrize("settings", [{"learning_rate": 0.0}, {"weight_decay": -1.0}, {"feature_dropout": 1.0}])
def test_bad_settings(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ControllerModule(**settings)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"model\.colour"):
        train_main(["fit", "--data.traces", "x", "--out", "y", "--model.colour", "1"])


def test_the_sweep_names_options_that_exist() -> None:
    sweep = yaml.safe_load((ROOT / "configs" / "sweep.yaml").read_text())
    assert sweep["metric"]["name"] == "val/nll"
    options = []
    for name, values in sweep["parameters"].items():
        first = values.get("value", values.get("values", [values.get("min")]))
        options.append(f"--{name}={first[0] if isinstance(first, list) else first}")
    with pytest.raises(SystemExit) as error:  # parsed to the end
        train_main(["fit", "--config", str(ROOT / "configs" / "train.yaml"), *options, "--print_config"])
    assert error.value.code == 0
