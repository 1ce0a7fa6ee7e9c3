"""``beamwise train``: LightningCLI over `ControllerModule` and `TraceData`; fitting ends with the controller."""

from __future__ import annotations

import hashlib
import warnings
from argparse import ArgumentError
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from beamwise.controller.checkpoint import Controller
from beamwise.controller.info import ControllerInfo
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.errors import BeamwiseError, ConfigError
from beamwise.decoding.trace_schema import MANIFEST, read_manifest

from .calibration import calibrate
from .data import TraceData
from .module import ControllerModule
from .report import LEARNED, MOST_ROWS, Report, make_report
from .tracking import RunLogger, log_folder

_MODEL_ROLES = ("target", "draft", "drafter")
_EXPECTED_WARNINGS = (
    "LightningCLI's args parameter",  # beamwise passes its arguments on purpose
    "Your `IterableDataset` has `__len__` defined",  # ours is exact, and loads in this process
    "The number of training batches",  # few traces: fewer steps than the logging interval
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",  # Lightning's own
    r"[\s\S]*was deprecated in v4\.49",  # Lightning's use of jsonargparse
    r"[\s\S]*JsonargparseDeprecationWarning",
    r"[\s\S]*skip_none parameter was deprecated",
)
"""Beginnings of warnings that tell a user nothing."""


class ControllerCLI(LightningCLI):
    """Adds the output folder, early stopping, checkpoints of the best and the last epoch, and what follows a fit."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--out", type=str, required=True, help="Folder of the controller.")
        parser.add_argument(
            "--profile", type=str | None, default=None, help="Latency profile (JSON or YAML) to ship in the controller."
        )
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults({"early_stopping.monitor": "val/nll", "early_stopping.patience": 10})
        for name, monitor in (("best", "val/nll"), ("last", None)):
            parser.add_lightning_class_args(ModelCheckpoint, name)
            parser.set_defaults(
                {f"{name}.monitor": monitor, f"{name}.filename": name, f"{name}.enable_version_counter": False}
            )

    def instantiate_classes(self) -> None:
        """Make trainer, model and data.

        Raises:
            ConfigError: settings that Lightning or a class of ours cannot use.
        """
        try:
            self._place_outputs()
            super().instantiate_classes()
        except (BeamwiseError, ArgumentError):
            raise
        except Exception as error:  # each class has its own ways to refuse a setting
            raise ConfigError(f"These settings cannot be used: {type(error).__name__}: {error}") from error

    def _place_outputs(self) -> None:
        """Put everything that a run leaves behind into ``OUT/training``."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        training = str(Path(config.out) / "training")
        if config.trainer.default_root_dir is None:
            config.trainer.default_root_dir = training
        for checkpoint in (config.best, config.last):
            if checkpoint.dirpath is None:
                checkpoint.dirpath = str(Path(training) / "checkpoints")
        loggers = config.trainer.logger
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            if getattr(logger, "class_path", "").endswith("RunLogger") and logger.init_args.save_dir == ".":
                logger.init_args.save_dir = training

    def before_fit(self) -> None:
        """Look through the traces first: where they are refused, no wandb run has begun that nobody would finish."""
        cast(TraceData, self.datamodule).source  # noqa: B018 - opened on first use

    def after_fit(self) -> None:
        """Calibrate the best checkpoint, compare it with the baselines, save and log the controller."""
        if self.trainer.is_global_zero:
            config = self.config[self.subcommand]
            finish(self.trainer, cast(ControllerModule, self.model), self.datamodule, config.out, config.profile)
        self.trainer.strategy.barrier()


def finish(trainer: Any, module: ControllerModule, data: TraceData, out: str, profile: str | None) -> Report:
    """Turn a fitted module into a controller folder.

    Args:
        trainer: that fitted it; its monitoring checkpoint callback knows the best weights.
        module: the fitted module.
        data: its data.
        out: folder of the controller.
        profile: latency profile to ship, or None.

    Returns:
        The report on held-out prompts.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for callback in trainer.checkpoint_callbacks:
        if callback.monitor is not None and callback.best_model_path:
            best = torch.load(callback.best_model_path, map_location="cpu", weights_only=True)
            module.load_state_dict(best["state_dict"])
    predictor = module.predictor.to("cpu").eval()
    source = data.source
    calibrate(predictor, source.load("val", MOST_ROWS))
    report = make_report(predictor, source, folder)
    info = ControllerInfo(
        predictor=predictor.config,
        profile=None if profile is None else LatencyProfile.load(profile),
        models=_models(source.folders),
        num_beams=sorted(source.beams),
        max_draft_width=source.max_draft_width,
        max_gamma=source.max_gamma,
        metrics=report.to_dict(),
        training={
            "traces": {Path(traces).resolve().name: _fingerprint(traces) for traces in source.folders},
            "steps": trainer.global_step,
            "module": {name: value for name, value in module.hparams.items() if not name.startswith("_")},
            "split": {"fractions": list(source.fractions), "seed": source.seed},
        },
    )
    Controller(predictor, info).save_pretrained(folder)
    _log(trainer, report, folder)
    return report


def _models(folders: list[str]) -> dict[str, str]:
    """Target, draft and drafter, where all traces agree on them."""
    configs = [read_manifest(folder).config for folder in folders]
    return {
        role: str(configs[0][role])
        for role in _MODEL_ROLES
        if configs[0].get(role) is not None and all(config.get(role) == configs[0][role] for config in configs)
    }


def _fingerprint(folder: str) -> str:
    """Of the manifest, which names the hash of every shard."""
    return hashlib.sha256((Path(folder) / MANIFEST).read_bytes()).hexdigest()[:16]


def _log(trainer: Any, report: Report, folder: Path) -> None:
    for logger in trainer.loggers:
        scores = {f"held_out/{name}": value for name, value in vars(report.scores[LEARNED]).items()}
        logger.log_metrics(scores, step=trainer.global_step)
        if isinstance(logger, RunLogger):
            for path in report.plots:
                logger.log_image(f"plots/{path.stem}", [str(path)])
            files = ["config.json", "model.safetensors", "report.md"]
            log_folder(logger.experiment, folder, "controller", files, vars(report.scores[LEARNED]))
            logger.experiment.finish()


def train_main(args: list[str]) -> None:
    """Run ``beamwise train`` with its arguments (``fit --config configs/train.yaml --data.traces DIR --out OUT``).

    Args:
        args: as on the command line, without ``beamwise train``.

    Raises:
        BeamwiseError: bad traces or settings.
        ArgumentError: bad arguments.
        SystemExit: help.
    """
    with warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        ControllerCLI(
            ControllerModule,
            TraceData,
            args=args,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_kwargs={
                "prog": "beamwise train",
                "description": "Train a width controller on traces.",
                "exit_on_error": False,
                **{name: {"exit_on_error": False} for name in ControllerCLI.subcommands()},
            },
        )
