"""The Lightning module that fits a width predictor by censored likelihood."""

from __future__ import annotations

import math
from typing import Any, cast

import lightning as L
import torch
from torchmetrics import MeanMetric, MeanSquaredError, Metric, SumMetric
from torchmetrics.classification import BinaryAUROC

from beamwise.controller.predictor import (
    DEFAULT_EDGES,
    Outcomes,
    PredictorConfig,
    WidthPredictor,
    censored_nll,
    grid_outcomes,
    success_from_logits,
)
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.features import CONTEXT_NAMES

from .data import TraceData
from .rows import Rows
from .scores import CalibrationError


def rows_outcomes(rows: Rows, config: PredictorConfig) -> Outcomes:
    """The rows' outcomes on a predictor's grid, padded to its widths.

    Raises:
        ConfigError: the rows have more beams than the predictor serves.
    """
    missing = config.max_width - rows.needed.shape[1]
    if missing < 0:
        raise ConfigError(
            f"The traces have up to {rows.needed.shape[1]} beams, the predictor serves {config.max_width}: set "
            f"--model.max_width {rows.needed.shape[1]}"
        )
    needed = torch.nn.functional.pad(rows.needed, (0, missing))
    return grid_outcomes(needed, rows.num_beams, rows.limit, config.edges)


class ControllerModule(L.LightningModule):
    """Trains both networks of a `WidthPredictor`.

    Args:
        max_width: largest number of beams to serve.
        edges: upper edges of the bins of candidate counts: the draft widths that the policy may choose from.
        hidden: units in each hidden layer.
        learning_rate: peak of the schedule (linear warm-up, cosine decay).
        weight_decay: of AdamW.
        warmup: share of the steps that warm up.
        feature_dropout: share of the features that are replaced by their mean, anew in every step, while training.
    """

    def __init__(
        self,
        max_width: int = 8,
        edges: list[int] | None = None,
        hidden: int = 32,
        learning_rate: float = 5e-3,
        weight_decay: float = 0.05,
        warmup: float = 0.05,
        feature_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if learning_rate <= 0 or weight_decay < 0:
            raise ConfigError(
                f"learning_rate is {learning_rate} and weight_decay {weight_decay}: above 0, and at least 0"
            )
        if not 0.0 <= warmup < 1.0 or not 0.0 <= feature_dropout < 1.0:
            raise ConfigError(
                f"warmup is {warmup} and feature_dropout {feature_dropout}: they are shares, at least 0 and below 1"
            )
        self.feature_dropout = feature_dropout
        self.learning_rate, self.weight_decay, self.warmup = learning_rate, weight_decay, warmup
        config = PredictorConfig(max_width, tuple(edges or DEFAULT_EDGES), hidden)
        self.predictor = WidthPredictor(config)
        self.metrics = torch.nn.ModuleDict({stage: _StageMetrics(max_width) for stage in ("val_", "test_")})

    def setup(self, stage: str) -> None:
        """Take the normalisation from the training rows."""
        if stage == "fit":
            data = cast(TraceData, self.trainer.datamodule)  # type: ignore[attr-defined]
            self.predictor.set_statistics(*data.source.statistics())

    def training_step(self, rows: Rows, batch_index: int) -> torch.Tensor:
        outcomes = rows_outcomes(rows, self.predictor.config)
        dropped = self._noise(rows.features) < self.feature_dropout
        features = torch.where(dropped, self.predictor.full.mean, rows.features)
        full = censored_nll(self.predictor.full(features), outcomes)
        prior = censored_nll(self.predictor.prior(features[:, : len(CONTEXT_NAMES)]), outcomes)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log_dict({"train/nll": full, "train/prior_nll": prior, "train/learning_rate": rate}, batch_size=len(rows))
        return full + prior

    def validation_step(self, rows: Rows, batch_index: int) -> None:
        self._evaluate(rows, "val")

    def test_step(self, rows: Rows, batch_index: int) -> None:
        self._evaluate(rows, "test")

    def on_validation_epoch_end(self) -> None:
        self._log("val")

    def on_test_epoch_end(self) -> None:
        self._log("test")

    def configure_optimizers(self) -> Any:
        """AdamW, linear warm-up, then cosine to zero over the whole run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        ramp = max(1, round(self.warmup * steps))

        def factor(step: int) -> float:
            if step < ramp:
                return (step + 1) / ramp
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - ramp) / max(1, steps - ramp))))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _noise(self, features: torch.Tensor) -> torch.Tensor:
        """Uniform, a function of seed, step and process: a resumed run draws what an uninterrupted one draws."""
        seed = torch.initial_seed() + 1_000_003 * self.global_step + 7_919 * self.global_rank
        generator = torch.Generator(features.device).manual_seed(seed % 2**63)
        return torch.rand(features.shape, generator=generator, device=features.device)

    def _evaluate(self, rows: Rows, stage: str) -> None:
        outcomes = rows_outcomes(rows, self.predictor.config)
        logits = self.predictor.full(rows.features)
        prior = self.predictor.prior(rows.features[:, : len(CONTEXT_NAMES)])
        metrics = cast(_StageMetrics, self.metrics[f"{stage}_"])
        metrics.update(logits, prior, outcomes)

    def _log(self, stage: str) -> None:
        metrics = cast(_StageMetrics, self.metrics[f"{stage}_"])
        beams = cast(TraceData, self.trainer.datamodule).source.max_width  # type: ignore[attr-defined]
        for name, value in metrics.compute(beams).items():
            self.log(f"{stage}/{name}", value, sync_dist=True)  # equal everywhere already; says so to Lightning
        metrics.reset()


class _StageMetrics(torch.nn.Module):
    """Likelihood of both networks; ranking, Brier score and calibration error of the full one, width by width."""

    def __init__(self, max_width: int) -> None:
        super().__init__()
        self.nll, self.prior_nll = MeanMetric(), MeanMetric()
        self.auroc = torch.nn.ModuleList(BinaryAUROC(thresholds=256) for _ in range(max_width))
        self.brier = torch.nn.ModuleList(MeanSquaredError() for _ in range(max_width))
        self.ece = torch.nn.ModuleList(CalibrationError() for _ in range(max_width))
        self.seen = torch.nn.ModuleList(SumMetric() for _ in range(max_width))

    def update(self, logits: torch.Tensor, prior: torch.Tensor, outcomes: Outcomes) -> None:
        count = int((outcomes.survived | outcomes.event).any(2).sum())
        self.nll.update(censored_nll(logits, outcomes), count)
        self.prior_nll.update(censored_nll(prior, outcomes), count)
        probs = success_from_logits(logits)
        for width in range(len(self.auroc)):
            known = outcomes.known[:, width]
            cast(Metric, self.seen[width]).update(known.sum())
            if known.any():
                for metrics in (self.auroc, self.brier, self.ece):
                    label = outcomes.success[:, width][known]
                    target = label.float() if metrics is self.brier else label.long()
                    cast(Metric, metrics[width]).update(probs[:, width][known], target)

    def compute(self, beams: int) -> dict[str, torch.Tensor]:
        """All values, for the widths that occur (on any device)."""
        values = {"nll": self.nll.compute(), "prior_nll": self.prior_nll.compute()}
        for width in range(min(beams, len(self.auroc))):
            if cast(Metric, self.seen[width]).compute() == 0:
                continue  # a sanity check sees a few rows only
            for name, metrics in (("auroc", self.auroc), ("brier", self.brier), ("ece", self.ece)):
                values[f"{name}_w{width + 1}"] = cast(Metric, metrics[width]).compute()
        return values

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()
