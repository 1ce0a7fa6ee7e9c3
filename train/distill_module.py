"""The Lightning module that trains a draft against cached teacher states."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import lightning as L
import torch
from torch.nn.functional import kl_div, log_softmax, mse_loss
from transformers import PreTrainedModel

from beamwise.decoding.draft_model import own_state

from .distill_data import TeacherSequence

Batch = dict[str, torch.Tensor]

_DEEPER_EVERY = 4
"""Steps between those that also train on the draft's own states: they cost twice as much."""


def collate(sequences: Sequence[TeacherSequence]) -> Batch:
    """Pad sequences on the right.

    Returns:
        ``tokens`` int64 (B, T), ``hidden`` bfloat16 (B, T, H) of the teacher, ``learn`` bool (B, T): the positions
        whose next token is the response's.
    """
    longest = max(sequence.tokens_T.shape[0] for sequence in sequences)
    width = sequences[0].hidden_TH.shape[1]
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    hidden = torch.zeros(len(sequences), longest, width, dtype=sequences[0].hidden_TH.dtype)
    learn = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        length = sequence.tokens_T.shape[0]
        tokens[row, :length] = sequence.tokens_T
        hidden[row, :length] = sequence.hidden_TH
        learn[row, sequence.first : length - 1] = True
    return {"tokens": tokens, "hidden": hidden, "learn": learn}


class StepLoader:
    """Batches as a function of (seed, step), so that a resumed run sees exactly what an uninterrupted one would.

    Args:
        sequences: to draw from; each epoch is a fresh permutation, sorted by length inside groups of batches.
        batch_size: sequences per batch.
        seed: of the permutations.
    """

    def __init__(self, sequences: Sequence[TeacherSequence], batch_size: int, seed: int) -> None:
        self.sequences = sequences
        self.batch_size = min(batch_size, len(sequences))
        self.seed = seed
        self.start = 0
        """Step of the first batch: set to the trainer's global step when a run resumes."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches that see every sequence once (an incomplete last one is dropped)."""
        return len(self.sequences) // self.batch_size

    def batch(self, step: int) -> Batch:
        """The batch of a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.sequences), generator=generator).tolist()
        group = 16 * self.batch_size
        blocks = [order[at : at + group] for at in range(0, len(order), group)]
        order = [i for block in blocks for i in sorted(block, key=lambda i: self.sequences[i].tokens_T.shape[0])]
        batches = [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]
        batches = [batch for batch in batches if len(batch) == self.batch_size]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return collate([self.sequences[i] for i in batches[shuffled[index]]])

    def __iter__(self) -> Iterator[Batch]:
        step = self.start
        while True:
            yield self.batch(step)
            step += 1


class DraftDistiller(L.LightningModule):
    """Forward KL to the teacher's distribution on the draft's vocabulary; feature drafts also learn its hidden state.

    A feature draft sees every fourth batch twice: on the teacher's states, and with a random half of them replaced by
    its own from the first pass, since that is what it reads deeper in a forest.

    Args:
        target: the teacher; only its head is used.
        draft: from `build_draft`, in float32.
        kind: ``"pruned"`` or ``"feature"``.
        learning_rate: peak of the cosine schedule.
        warmup_steps: of linear warm-up.
        max_steps: length of the schedule.
        feature_weight: of the hidden-state loss (relative mean squared error).
        seed: of the random replacement.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        kind: str,
        learning_rate: float,
        warmup_steps: int,
        max_steps: int,
        feature_weight: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        head = cast(torch.nn.Linear, target.get_output_embeddings())  # type: ignore[no-untyped-call]
        self._teacher_head = head.weight.detach()  # a plain tensor: frozen, and not in the checkpoint
        token_ids = cast("torch.Tensor | None", getattr(draft, "draft_token_ids", None))
        self.token_ids = torch.arange(head.weight.shape[0]) if token_ids is None else token_ids
        self._columns = self._teacher_head[self.token_ids].contiguous()
        self._draft = [draft]  # in a list: its embeddings are the target's and must not be trained or saved
        draft.requires_grad_(False)
        self.own = torch.nn.ParameterDict()
        for name, parameter in own_state(draft).items():
            parameter.requires_grad_(True)
            self.own[name.replace(".", "/")] = parameter
        self.kind = kind
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.feature_weight = feature_weight
        self.seed = seed
        self.loader: StepLoader | None = None
        self._outcomes: dict[str, dict[str, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))

    def states(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The draft's last hidden states (B, T, H), for tokens (B, T) and the hidden states (B, T, H) it may read."""
        draft = self._draft[0]
        embedded = draft.get_input_embeddings()(tokens)
        if self.kind == "feature":
            before = torch.nn.functional.pad(features[:, :-1], (0, 0, 1, 0)).to(embedded.dtype)
            embedded = cast(torch.nn.Module, draft.fusion)(torch.cat([embedded, before], dim=-1))
        return cast(torch.Tensor, draft.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state)

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        tokens, hidden, learn = batch["tokens"], batch["hidden"].to(torch.float32), batch["learn"]
        states = self.states(tokens, hidden)
        loss, kl = self._loss(states, hidden, learn)
        if self.kind == "feature" and self.global_step % _DEEPER_EVERY == 0:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.global_step)
            own = torch.rand(tokens.shape, generator=generator).to(tokens.device) < 0.5
            mixed = torch.where(own.unsqueeze(-1), states.detach().float(), hidden)
            deeper, _ = self._loss(self.states(tokens, mixed), hidden, learn)
            loss = loss + deeper
        self.log("train/kl", kl, prog_bar=True)
        return loss

    def _loss(
        self, states: torch.Tensor, hidden: torch.Tensor, learn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mine, teacher = states[learn], hidden[learn]
        log_q = log_softmax(mine @ self._columns.to(mine.dtype).T, dim=-1, dtype=torch.float32)
        with torch.no_grad():  # the teacher on the draft's vocabulary: forward KL has the same optimum there
            log_p = log_softmax(teacher.to(mine.dtype) @ self._columns.to(mine.dtype).T, dim=-1, dtype=torch.float32)
        kl = kl_div(log_q, log_p, log_target=True, reduction="batchmean")
        if self.kind != "feature":
            return kl, kl
        return kl + self.feature_weight * mse_loss(mine.float(), teacher) / teacher.var(), kl

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> None:
        tokens, hidden, learn = batch["tokens"], batch["hidden"].to(torch.float32), batch["learn"]
        p_logits = hidden[learn] @ self._teacher_head.float().T
        features = hidden
        for depth in range(1, 3 if self.kind == "feature" else 2):
            states = self.states(tokens, features)
            outcome = acceptance(p_logits, states[learn].float() @ self._columns.float().T, self.token_ids)
            for name, values in outcome.items():
                self._outcomes[batch["category"]][f"{name}_depth{depth}" if depth > 1 else name].append(values)
            # the next depth reads the draft's own state everywhere: a little harder than in a forest
            features = states.float()

    def on_validation_epoch_end(self) -> None:
        for category, outcomes in self.metrics().items():
            for name, value in outcomes.items():
                self.log(f"val/{category}/{name}", value)
        self._outcomes.clear()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Means per category since the last validation began."""
        return {
            category: {name: float(torch.cat(values).mean()) for name, values in outcomes.items()}
            for category, outcomes in self._outcomes.items()
        }

    def train_dataloader(self) -> StepLoader:
        assert self.loader is not None
        self.loader.start = self.global_step
        return self.loader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.own.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            share = (step - self.warmup_steps) / max(self.max_steps - self.warmup_steps, 1)
            return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def acceptance(p_logits: torch.Tensor, q_logits: torch.Tensor, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """How well a draft matches, per position.

    Args:
        p_logits: float32 (N, V), the target's.
        q_logits: float32 (N, Vd), the draft's.
        token_ids: int64 (Vd,), target tokens of the draft's columns.

    Returns:
        ``acceptance``: sum of min(p, q) at temperature 1; ``acceptance_t07_k50``: the same at temperature 0.7 with
        top_k 50 on both sides; ``top1``: same most likely token. Each float32 (N,).
    """
    p, q = torch.softmax(p_logits, dim=-1), torch.softmax(q_logits, dim=-1)
    warped_p, warped_q = _warp(p_logits), _warp(q_logits)
    return {
        "acceptance": torch.minimum(p[:, token_ids], q).sum(-1),
        "acceptance_t07_k50": torch.minimum(warped_p[:, token_ids], warped_q).sum(-1),
        "top1": (p_logits.argmax(-1) == token_ids[q_logits.argmax(-1)]).float(),
    }


def _warp(logits: torch.Tensor, temperature: float = 0.7, top_k: int = 50) -> torch.Tensor:
    top = torch.topk(logits, min(top_k, logits.shape[-1]), dim=-1)
    kept = torch.full_like(logits, float("-inf")).scatter(-1, top.indices, top.values)
    return torch.softmax(kept / temperature, dim=-1)
