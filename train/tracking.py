"""Runs in wandb: online only for who is logged in or asks for it, offline otherwise, and never a question asked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger


def wandb_mode() -> str:
    """``WANDB_MODE`` where it is set; else online for a user with credentials, and offline without."""
    chosen = os.environ.get("WANDB_MODE")
    if chosen:
        return chosen
    return "online" if wandb.login(prompt=False) else "offline"


class RunLogger(WandbLogger):
    """Lightning's wandb logger in the mode of `wandb_mode`.

    Args:
        project: wandb project.
        name: of the run; None lets wandb invent one.
        save_dir: folder that holds the ``wandb`` folder.
        job_type: kind of run.
        tags: of the run.
    """

    def __init__(
        self,
        project: str = "beamwise",
        name: str | None = None,
        save_dir: str = ".",
        job_type: str = "train",
        tags: list[str] | None = None,
    ) -> None:
        Path(save_dir).mkdir(parents=True, exist_ok=True)  # else wandb writes to a temporary folder
        # not Lightning's ``offline``: that changes WANDB_MODE for the whole process
        super().__init__(name, save_dir, mode=wandb_mode(), project=project, job_type=job_type, tags=tags)


def log_folder(run: Any, folder: Path, name: str, files: Sequence[str], metadata: Mapping[str, Any]) -> None:
    """Log files of a folder as a model artifact of a run (kept for a later ``wandb sync`` when offline).

    Args:
        run: the wandb run.
        folder: that holds the files.
        name: of the artifact.
        files: names inside the folder.
        metadata: of the artifact.
    """
    artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
    for file in files:
        artifact.add_file(str(folder / file), name=file)
    run.log_artifact(artifact)


def log_summary(
    job_type: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    plots: Sequence[Path] = (),
    project: str = "beamwise",
    save_dir: str = ".",
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]] | None = None,
) -> None:
    """Record a finished job (a collection, a benchmark) as a run of its own.

    Args:
        job_type: kind of job.
        config: its settings.
        summary: its results.
        plots: PNG files.
        project: wandb project.
        save_dir: folder that holds the ``wandb`` folder.
        tables: by name, column names and rows.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    mode: Any = wandb_mode()
    with wandb.init(project=project, job_type=job_type, config=dict(config), dir=save_dir, mode=mode) as run:
        run.summary.update(dict(summary))
        shown: dict[str, Any] = {f"plots/{path.stem}": wandb.Image(str(path)) for path in plots}
        for name, (columns, rows) in (tables or {}).items():
            shown[f"tables/{name}"] = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        run.log(shown)
