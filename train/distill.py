"""`beamwise distil`: make a draft for a target from a few of its own layers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from beamwise.decoding.draft_model import DraftCheckpoint, build_draft, load_draft, read_draft_config, save_draft
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.models import load_model
from beamwise.decoding.prompts import Prompt, read_prompts

from .distill_data import (
    RESPONSE_SETTINGS,
    Record,
    Sampling,
    TeacherSequence,
    fingerprint,
    frequent_tokens,
    teacher_cache,
    write_responses,
)
from .distill_module import DraftDistiller, StepLoader, collate
from .tracking import RunLogger

_VALIDATION_SETTINGS: tuple[Sampling, ...] = ({"do_sample": True, "temperature": 1.0, "top_k": 0},)


@dataclass
class DistilConfig:
    """Settings of `beamwise distil`.

    Attributes:
        prompts: JSONL files with the training prompts.
        validation_prompts: JSONL files with held-out prompts.
        out: folder of the finished draft.
        work_dir: folder for responses, teacher states, checkpoints and logs; a second run continues from it.
        target: the target model: a name, folder or Hugging Face id.
        kind: pruned (fewer layers), or feature (also reads the target's last hidden state).
        layers: the target's layers to keep.
        vocabulary: tokens of the draft, the most frequent of the training text; 0 keeps all.
        init: folder of a draft to go on from, of the same kind and layers; its vocabulary is kept. None starts from the
            target's own layers.
        on_policy: train on responses that the target writes; otherwise on the files' own.
        max_prompt_tokens: prompts longer than this are left out.
        max_new_tokens: longest response.
        max_tokens: longest training sequence; longer ones lose their front.
        validation_rows: held-out prompts used per file.
        max_steps: optimiser steps.
        batch_size: sequences per step.
        learning_rate: peak learning rate.
        warmup_steps: steps of linear warm-up.
        precision: of the training forward, as Lightning names it.
        validate_every: steps between validations.
        seed: of everything drawn at random.
        device: auto, cpu or cuda.
        wandb: log to wandb (as WANDB_MODE says; without it online for who is logged in, else offline).
    """

    prompts: list[str]
    validation_prompts: list[str]
    out: str
    work_dir: str = "runs/distil"
    target: str = "smollm2-135m"
    kind: Literal["pruned", "feature"] = "pruned"
    layers: list[int] = field(default_factory=lambda: [0, 29])
    vocabulary: int = 8192
    init: str | None = None
    on_policy: bool = True
    max_prompt_tokens: int = 700
    max_new_tokens: int = 256
    max_tokens: int = 512
    validation_rows: int = 48
    max_steps: int = 2000
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "bf16-mixed"
    validate_every: int = 500
    seed: int = 0
    device: str = "auto"
    wandb: bool = True

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "max_new_tokens", "max_tokens", "validate_every", "validation_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if not self.prompts or not self.validation_prompts:
            raise ConfigError("prompts and validation_prompts: give at least one JSONL file each")


@dataclass(frozen=True)
class _Data:
    train: list[TeacherSequence]
    validation: list[TeacherSequence]
    token_ids: torch.Tensor | None
    fingerprints: dict[str, Any]


def distil(config: DistilConfig) -> Path:
    """Write responses, cache the teacher, train the draft and save it. Every step resumes where a run was cut off.

    Args:
        config: the settings.

    Returns:
        The folder of the draft.

    Raises:
        ConfigError: a setting out of range.
        InputError: a bad prompts file.
        ModelError: a target that cannot be loaded or pruned.
    """
    L.seed_everything(config.seed)
    work = Path(config.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    data = _prepare(config, work)
    target, _ = load_model(config.target, dtype=torch.float32, device=config.device)
    draft = _start(config, target, data.token_ids)
    module = DraftDistiller(
        target, draft, config.kind, config.learning_rate, config.warmup_steps, config.max_steps, seed=config.seed
    )
    module.loader = StepLoader(data.train, config.batch_size, config.seed)
    validation = _ValidationBatches(data.validation)
    trainer = _trainer(config, work)
    last = work / "checkpoints" / "last.ckpt"
    trainer.fit(
        module,
        val_dataloaders=validation,
        ckpt_path=str(last) if last.is_file() else None,
        weights_only=True,
    )
    metrics = {
        name: round(float(value), 4) for name, value in trainer.validate(module, validation, verbose=False)[0].items()
    }
    info = DraftCheckpoint(
        kind=config.kind,
        target=config.target,
        layers=list(config.layers),
        training={"config": asdict(config), "steps": trainer.global_step, **data.fingerprints},
        metrics=metrics,
    )
    save_draft(config.out, draft, target, info)
    (work / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    return Path(config.out)


def _start(config: DistilConfig, target: PreTrainedModel, token_ids: torch.Tensor | None) -> PreTrainedModel:
    """The draft before its first step."""
    if config.init is None:
        return build_draft(target, config.kind, config.layers, token_ids)
    info = read_draft_config(config.init)
    if (info.kind, info.layers) != (config.kind, config.layers):
        raise ConfigError(
            f"init is '{config.init}', a {info.kind} draft of layers {info.layers}: set kind and layers to these, or "
            f"leave init out (kind is {config.kind}, layers {config.layers})"
        )
    return load_draft(config.init, target)


def _prepare(config: DistilConfig, work: Path) -> _Data:
    """Responses and teacher states of the training and validation prompts, from the cache where they are there."""
    prompts = [prompt for file in config.prompts for prompt in read_prompts(file)]
    held_out = []
    for file in config.validation_prompts:  # evenly spaced, since files are often sorted by category
        candidates = read_prompts(file)
        held_out += candidates[:: -(-len(candidates) // config.validation_rows)]
    writer, tokenizer = load_model(config.target, dtype=_writer_dtype(config), device=config.device)
    settings = RESPONSE_SETTINGS if config.on_policy else ()
    train = _responses(config, writer, tokenizer, prompts, work / "responses.jsonl", settings)
    validation = _responses(config, writer, tokenizer, held_out, work / "validation.jsonl", _VALIDATION_SETTINGS)
    vocab_size = int(writer.config.get_text_config().vocab_size)
    token_ids = frequent_tokens(train, config.vocabulary, vocab_size) if config.vocabulary else None
    console = Console(stderr=True)
    sequences = []
    for name, records in (("training", train), ("validation", validation)):
        with console.status(f"teacher states of {len(records)} {name} sequences"):
            sequences.append(teacher_cache(writer, records, work, max_tokens=config.max_tokens))
    fingerprints = {
        "train_fingerprint": fingerprint(train, config.max_tokens),
        "train_sequences": len(train),
        "train_response_tokens": sum(len(record.response_ids) for record in train),
    }
    usable = [[s for s in part if s.tokens_T.shape[0] > s.first + 2] for part in sequences]
    return _Data(usable[0], usable[1], token_ids, fingerprints)


def _writer_dtype(config: DistilConfig) -> torch.dtype:
    return torch.float32 if config.precision == "32-true" else torch.bfloat16


def _responses(
    config: DistilConfig,
    writer: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    cache: Path,
    settings: Sequence[Sampling],
) -> list[Record]:
    console = Console(stderr=True)
    with console.status(f"responses to {len(prompts)} prompts") as status:
        return write_responses(
            writer,
            tokenizer,
            prompts,
            cache,
            settings=settings,
            max_prompt_tokens=config.max_prompt_tokens,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            progress=lambda done, total: status.update(f"responses: {done} of {total} prompts"),
        )


class _ValidationBatches:
    """Held-out sequences, a few of one category at a time."""

    def __init__(self, sequences: Sequence[TeacherSequence], batch_size: int = 4) -> None:
        by_category: dict[str, list[TeacherSequence]] = {}
        for sequence in sequences:
            by_category.setdefault(sequence.category, []).append(sequence)
        self._batches = [
            (category, members[at : at + batch_size])
            for category, members in by_category.items()
            for at in range(0, len(members), batch_size)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for category, members in self._batches:
            yield {**collate(members), "category": category}


def _trainer(config: DistilConfig, work: Path) -> L.Trainer:
    loggers: list[Logger] = [CSVLogger(str(work), name="csv")]
    if config.wandb:
        tracker = RunLogger("beamwise-distil", save_dir=str(work), job_type="distil")
        tracker.log_hyperparams(asdict(config))
        loggers.append(tracker)
    checkpoints = ModelCheckpoint(
        dirpath=work / "checkpoints", save_last=True, every_n_train_steps=max(config.validate_every // 2, 1)
    )
    return L.Trainer(
        accelerator="cpu" if config.device == "cpu" or not torch.cuda.is_available() else "gpu",
        devices=1,
        precision=cast(Any, config.precision),
        max_steps=config.max_steps,
        val_check_interval=config.validate_every,
        limit_val_batches=1.0,
        gradient_clip_val=1.0,
        logger=loggers,
        callbacks=[checkpoints, LearningRateMonitor("step")],
        enable_model_summary=False,
        log_every_n_steps=20,
        use_distributed_sampler=False,
    )
