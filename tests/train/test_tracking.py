"""wandb's mode, and the summaries of other jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from beamwise.train import tracking
from beamwise.train.tracking import RunLogger, log_summary, wandb_mode

from .wandb_file import config_names, item_names, read_run


@pytest.mark.parametrize(("logged_in", "mode"), [(True, "online"), (False, "offline")])
def test_without_a_choice_who_is_logged_in_is_online(
    monkeypatch: pytest.MonkeyPatch, logged_in: bool, mode: str
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb, "login", lambda prompt: logged_in)
    assert wandb_mode() == mode


@pytest.mark.parametrize("mode", ["offline", "online", "disabled"])
def test_a_choice_is_respected(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(wandb, "login", lambda prompt: pytest.fail("asked"))
    assert wandb_mode() == mode


def test_disabled_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = RunLogger(save_dir=str(tmp_path))
    logger.log_metrics({"loss": 1.0})
    logger.experiment.finish()
    assert not list(tmp_path.rglob("*.wandb"))


def test_summary_of_a_job(tmp_path: Path) -> None:
    assert tracking.wandb_mode() == "offline"
    log_summary("benchmark", {"num_beams": 4}, {"tokens_per_second": 12.5}, save_dir=str(tmp_path))
    records = read_run(tmp_path)
    assert any("tokens_per_second" in item_names(record.summary.update) for record in records)
    assert "num_beams" in config_names(records)
