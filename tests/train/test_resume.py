"""Runs that stop in the middle of an epoch and go on from their checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from beamwise.train.data import TraceData
from beamwise.train.module import ControllerModule


class Stopped(Exception):
    """Stands for a kill."""


class StopAt(L.Callback):
    """Stops training after a step, behind the checkpoint callback."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step:
            raise Stopped


def run(traces: Path, folder: Path, stop: int | None, resume: Path | None = None, cache_rows: int = 0) -> L.Trainer:
    """Train for three epochs, with a checkpoint after every tenth step; stop early where told so."""
    L.seed_everything(3, verbose=False)
    data = TraceData(str(traces), batch_size=128, cache_rows=cache_rows, shuffle_rows=1_000)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            *([] if stop is None else [StopAt(stop)]),
            ModelCheckpoint(folder, "last", every_n_train_steps=10, enable_version_counter=False),
        ],
    )
    module = ControllerModule(max_width=4)
    if stop is None:
        trainer.fit(module, data, ckpt_path=resume, weights_only=True)
        return trainer
    with pytest.raises(Stopped):
        trainer.fit(module, data)
    return trainer


@pytest.mark.parametrize(("stop", "cache_rows"), [(25, 0), (25, 10**6), (61, 0)])
def test_a_stopped_run_ends_with_the_weights_of_a_whole_one(
    traces: Path, tmp_path: Path, stop: int, cache_rows: int
) -> None:
    whole = run(traces, tmp_path / "whole", None, cache_rows=cache_rows)
    steps = int(whole.num_training_batches)
    assert (stop // 10 * 10) % steps != 0  # the checkpoint is inside an epoch
    run(traces, tmp_path / "part", stop, cache_rows=cache_rows)
    resumed = run(traces, tmp_path / "rest", None, tmp_path / "part" / "last.ckpt", cache_rows)
    assert resumed.global_step == whole.global_step == 3 * steps
    for name, value in whole.lightning_module.state_dict().items():
        assert torch.equal(resumed.lightning_module.state_dict()[name], value), name
    assert resumed.callback_metrics["val/nll"] == whole.callback_metrics["val/nll"]
