"""``beamwise train``: LightningCLI over `ControllerModule` and `TraceData`; fitting ends with the controller."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from beamwise.controller.checkpoint import Controller, ControllerInfo
from beamwise.controller.latency import LatencyProfile
from beamwise.decoding.trace_schema import MANIFEST, read_manifest

from .calibration import calibrate
from .data import TraceData
from .module import ControllerModule
from .report import LEARNED, Report, make_report
from .tracking import RunLogger, log_folder

_MODEL_ROLES = ("target", "draft", "drafter")


class ControllerCLI(LightningCLI):
    """Adds the output folder, the standard callbacks, and what happens after fitting."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--out", type=str, required=True, help="Folder of the controller.")
        parser.add_argument(
            "--profile", type=str | None, default=None, help="Latency profile (JSON or YAML) to ship in the controller."
        )
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults({"early_stopping.monitor": "val/nll", "early_stopping.patience": 8})
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/nll",
                "checkpoint.filename": "best",
                "checkpoint.save_last": True,
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.add_lightning_class_args(LearningRateMonitor, "learning_rate_monitor")

    def before_instantiate_classes(self) -> None:
        """Put everything that a run leaves behind into ``OUT/training``."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        training = str(Path(config.out) / "training")
        if config.trainer.default_root_dir is None:
            config.trainer.default_root_dir = training
        if config.checkpoint.dirpath is None:
            config.checkpoint.dirpath = str(Path(training) / "checkpoints")
        loggers = config.trainer.logger
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            if getattr(logger, "class_path", "").endswith("RunLogger") and logger.init_args.save_dir == ".":
                logger.init_args.save_dir = training

    def after_fit(self) -> None:
        """Calibrate the best checkpoint, compare it with the baselines, save and log the controller."""
        if self.trainer.is_global_zero:
            config = self.config[self.subcommand]
            finish(self.trainer, cast(ControllerModule, self.model), self.datamodule, config.out, config.profile)
        self.trainer.strategy.barrier()


def finish(trainer: Any, module: ControllerModule, data: TraceData, out: str, profile: str | None) -> Report:
    """Turn a fitted module into a controller folder.

    Args:
        trainer: that fitted it; its checkpoint callback knows the best weights.
        module: the fitted module.
        data: its data.
        out: folder of the controller.
        profile: latency profile to ship, or None.

    Returns:
        The report on held-out prompts.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    best = trainer.checkpoint_callback.best_model_path
    if best:
        state = torch.load(best, map_location="cpu", weights_only=True)["state_dict"]
        module.load_state_dict(state)
    predictor = module.predictor.to("cpu").eval()
    source = data.source
    calibrate(predictor, source.load("val"))
    report = make_report(predictor, source, folder)
    info = ControllerInfo(
        predictor=predictor.config,
        profile=None if profile is None else LatencyProfile.load(profile),
        models=_models(source.folders),
        num_beams=sorted(source.beams),
        metrics=report.to_dict(),
        training={
            "traces": {folder: _fingerprint(folder) for folder in source.folders},
            "steps": trainer.global_step,
            "module": dict(module.hparams),
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
        SystemExit: bad arguments, or help.
    """
    ControllerCLI(
        ControllerModule,
        TraceData,
        args=args,
        save_config_callback=SaveConfigCallback,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        parser_kwargs={"prog": "beamwise train", "description": "Train a width controller on traces."},
    )
