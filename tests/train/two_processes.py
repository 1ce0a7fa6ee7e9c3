"""Trains and validates on two processes: ``python -m tests.train.two_processes TRACES OUT.json`` (see test_ddp)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning as L
import torch

from beamwise.train.data import TraceData
from beamwise.train.module import ControllerModule


def metrics(trainer: L.Trainer, traces: str) -> dict[str, float]:
    """Validation metrics of one seed's weights, before any training."""
    L.seed_everything(5, verbose=False)
    module = ControllerModule(max_width=4)
    trainer.validate(module, TraceData(traces, batch_size=50), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def trainer_on(devices: int) -> L.Trainer:
    """A quiet trainer on the CPU."""
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(traces: str, out: str) -> None:
    """Write what both processes found."""
    trainer = trainer_on(2)
    found = metrics(trainer, traces)
    module = ControllerModule(max_width=4)
    trainer.fit(module, TraceData(traces))
    mine = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    everyone = torch.as_tensor(trainer.strategy.all_gather(mine))
    if trainer.is_global_zero:
        weights = {"processes": len(everyone), "same": all(torch.equal(other, mine) for other in everyone)}
        Path(out).write_text(json.dumps({"metrics": found, "steps": trainer.global_step, **weights}))
    trainer.strategy.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
