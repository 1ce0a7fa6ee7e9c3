"""One synthetic trace folder, and one controller trained on it, for all tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from beamwise.train.cli import train_main

from .synthetic import SyntheticWorld

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 7,000 reached layers of 300 prompts."""
    return SyntheticWorld(seed=0).write(tmp_path_factory.mktemp("traces"), prompts=300)


@pytest.fixture(scope="session")
def trained(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``beamwise train fit`` leaves, with the shipped configuration and wandb offline."""
    out = tmp_path_factory.mktemp("controller")
    profile = out / "profile.yaml"
    profile.write_text("tokens: [1, 4, 16, 64]\ntarget_ms: [20, 21, 27, 50]\ndraft_ms: [3, 3, 4, 6]\ndevice: none\n")
    arguments = ["fit", "--config", str(ROOT / "configs" / "train.yaml"), "--data.traces", str(traces)]
    arguments += ["--out", str(out), "--profile", str(profile), "--model.max_width", "4", "--trainer.max_epochs", "10"]
    train_main([*arguments, "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"])
    return out
