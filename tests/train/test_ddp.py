"""Two processes train and measure as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from beamwise.train.cli import train_main

from .conftest import ROOT
from .two_processes import metrics, trainer_on


def arguments(traces: Path, out: Path, batch_size: int) -> list[str]:
    """Of ``beamwise train``; without dropout, which each process draws for its own rows."""
    names = ["fit", "--config", str(ROOT / "configs" / "train.yaml"), "--data.traces", str(traces), "--out", str(out)]
    names += ["--model.max_width", "4", "--model.feature_dropout", "0", "--trainer.max_epochs", "3"]
    names += ["--data.batch_size", str(batch_size), "--data.cache_rows", "0", "--data.shuffle_rows", "1000"]
    return [*names, "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


def run_there(command: list[str]) -> None:
    """Run a Python command that starts its second process itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_trains_on_two_processes_as_on_one(traces: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    spread = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    run_there(["-m", "beamwise.cli", "train", *arguments(traces, two, 64), *spread])
    train_main([*arguments(traces, one, 128), "--trainer.logger", "false"])
    scores = [json.loads((out / "report.json").read_text())["scores"] for out in (one, two)]
    for model in scores[0]:
        assert scores[1][model] == pytest.approx(scores[0][model], abs=5e-3), model
    assert len(list((two / "training" / "wandb").glob("offline-run-*"))) == 1  # rank 0 alone


def test_two_processes_measure_as_one_and_keep_the_same_weights(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run_there(["-m", "tests.train.two_processes", str(traces), str(out)])
    found = json.loads(out.read_text())
    assert (found["processes"], found["same"]) == (2, True)
    assert found["steps"] > 0
    values = metrics(trainer_on(1), str(traces))
    assert {"val/nll", "val/prior_nll", "val/auroc_w1", "val/brier_w4", "val/ece_w2"} <= values.keys()
    assert found["metrics"] == pytest.approx(values, abs=1e-6)
