"""Beamwise inside transformers: ``model.generate(..., custom_generate=SpeculativeBeams(...))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from .compat import check_kind, check_length
from .config import DecodeConfig, Law, RunnerName, Verification, Warping, WidthMode
from .drafter_choice import DrafterName, make_drafter
from .drafters import Drafter
from .engine import BlockRecord, Engine
from .errors import ConfigError, InputError, UnsupportedError
from .outputs import pack, pad_hypotheses
from .paper_width import PaperWidth
from .row_processors import REFUSED as REFUSED_PROCESSORS
from .row_processors import processors_of_row
from .rows import Request, Result
from .rules import make_rules
from .stats import DecodeStats
from .widths import FixedWidth, WidthPolicy


class SpeculativeBeams:
    """Lossless speculative beam decoding as a ``custom_generate`` for ``model.generate``.

    The output is that of ``generate`` with the same arguments (greedy), or a draw from the same distribution
    (sampling); the settings here change only the speed. Scores of single steps are not kept: with
    ``return_dict_in_generate`` the output has ``sequences`` and ``sequences_scores``, and ``scores`` is None.

    Args:
        draft_model: a small causal LM with the target's vocabulary, or None.
        drafter: what proposes tokens (see `make_drafter`), or a `Drafter` of your own.
        gamma: layers drafted in one block.
        draft_width: candidates drafted at each layer (m); None takes ``num_beams`` + 4.
        policy: a width policy that replaces ``gamma`` and ``draft_width``.
        seed: of the noise when sampling; None draws one from torch's global generator, so ``torch.manual_seed`` works.
        batch_size: prompts decoded at once.
        observer: called after every block of every prompt.
        measure: keep wall-clock shares.
        verification: ``"coupled"``, or ``"rejection"`` (the paper's; sampling only). See `DecodeConfig` for this and
            the following ones; all but "coupled" in "exact" mode change the law of the output (docs/exactness.md).
        law: of rejection verification: ``"distinct"`` or ``"replacement"``.
        warping: of rejection verification: ``"per_beam"`` or ``"joint"``.
        width_mode: ``"exact"``, or ``"dynamic"``: keep as many beams at a layer as the policy says.
        min_width: dynamic mode: fewest beams drawn at a layer.
        threshold: dynamic mode without a policy of your own: the paper's t, see `PaperWidth`.
        carry_beams: dynamic mode: beams handed from block to block; None is all.
        runner: how the models' forwards are run, see `DecodeConfig`; on a GPU CUDA graphs, where they can be had.
        pack_weights: on the CPU, keep a second copy of the target's linear layers in the order that its kernels read:
            forwards of few tokens take 0.4 to 0.9 of the time. False saves the memory.

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        draft_model: PreTrainedModel | None = None,
        drafter: DrafterName | Drafter = "auto",
        gamma: int = 4,
        draft_width: int | None = None,
        policy: WidthPolicy | None = None,
        seed: int | None = None,
        batch_size: int = 8,
        observer: Callable[[BlockRecord], None] | None = None,
        measure: bool = False,
        verification: Verification = "coupled",
        law: Law = "distinct",
        warping: Warping = "per_beam",
        width_mode: WidthMode = "exact",
        min_width: int = 1,
        threshold: float = 0.7,
        carry_beams: int | None = None,
        runner: RunnerName = "auto",
        pack_weights: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: at least one prompt must be decoded at a time")
        PaperWidth(gamma, 1 if draft_width is None else draft_width, threshold)  # validates
        self.draft_model = draft_model
        self.drafter = drafter
        self.gamma = gamma
        self.draft_width = draft_width
        self.policy = policy
        self.seed = seed
        self.batch_size = batch_size
        self.observer = observer
        self.measure = measure
        self.threshold = threshold
        self.pack_weights = pack_weights
        self.variant = {
            "verification": verification,
            "law": law,
            "warping": warping,
            "width_mode": width_mode,
            "min_width": min_width,
            "carry_beams": carry_beams,
            "runner": runner,
        }
        self.stats = DecodeStats()
        """What the last call cost, all prompts together."""
        self._engine: Engine | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds by part (draft, target, other) of all calls so far; empty unless ``measure``."""
        return {} if self._engine is None else dict(self._engine.watch.seconds)

    def engine(self, target: PreTrainedModel, num_beams: int) -> Engine:
        """The engine for a target model; kept between calls."""
        policy = self.policy or self._default_policy(target, self.draft_width or num_beams + 4)
        if self._engine is None or self._engine.target.model is not target:
            named = self.drafter
            drafter = make_drafter(named, self.draft_model, target) if isinstance(named, str) else named
            self._engine = Engine(
                target, drafter, policy, self.batch_size, self.observer, self.measure, self.pack_weights
            )
        self._engine.policy = policy
        return self._engine

    def _default_policy(self, target: PreTrainedModel, draft_width: int) -> WidthPolicy:
        """Plans where no policy was given."""
        if self.variant["width_mode"] == "dynamic":
            return PaperWidth(self.gamma, draft_width, self.threshold)
        return FixedWidth(self.gamma, draft_width)

    @torch.inference_mode()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateBeamDecoderOnlyOutput | GenerateDecoderOnlyOutput:
        """Called by ``generate`` with prepared inputs (``input_ids`` already expanded by ``num_beams``)."""
        requests = self.requests(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        )
        results: list[Result | None] = [None] * len(requests)
        self.stats = DecodeStats()
        for number, result in self.engine(model, requests[0].config.num_beams).decode(requests):
            results[number] = result
            self.stats.add(result.stats)
        prompts = torch.stack([request.prompt_T for request in requests])
        chosen = [
            pad_hypotheses(result.hypotheses, request.prompt_T, request.config.num_return_sequences)
            for result, request in zip(results, requests, strict=True)
            if result is not None
        ]
        hypotheses = [hypothesis for row in chosen for hypothesis in row]
        return pack(hypotheses, prompts, generation_config, requests[0].rules.eos_ids)

    def requests(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        first_stream: int = 0,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> list[Request]:
        """What ``generate`` asks for, prompt by prompt. Arguments as of a ``custom_generate``.

        Args:
            model: the target.
            input_ids: int64 (prompts * num_beams, T).
            logits_processor: of the whole batch.
            stopping_criteria: EOS and length included.
            generation_config: of the call.
            first_stream: number of the first prompt, see `Request.stream`.
            seed: instead of this decoder's own.
            model_kwargs: the attention mask, and what is refused.

        Raises:
            ConfigError: a setting out of range.
            InputError: no tokens, or padding on the right.
            UnsupportedError: something that this decoder does not do.
        """
        _refuse_unsupported(model, input_ids, logits_processor, generation_config, model_kwargs)
        num_beams = int(generation_config.num_beams or 1)
        returned = int(generation_config.num_return_sequences or 1) if num_beams > 1 else 1
        prompts = input_ids[::num_beams]
        config = DecodeConfig(
            num_beams=num_beams,
            max_new_tokens=int(generation_config.max_length) - prompts.shape[1],
            do_sample=bool(generation_config.do_sample),
            length_penalty=float(
                generation_config.length_penalty if generation_config.length_penalty is not None else 1
            ),
            early_stopping=generation_config.early_stopping or False,
            num_return_sequences=returned,
            seed=self._next_seed(bool(generation_config.do_sample)) if seed is None else seed,
            **self.variant,  # type: ignore[arg-type]
        )
        engine = self.engine(model, num_beams)
        check_length(engine.target, prompts.shape[1] + config.max_new_tokens)
        padding = _count_padding(prompts, model_kwargs.get("attention_mask"), num_beams)
        eos = getattr(generation_config, "_eos_token_tensor", None)
        eos_ids = torch.empty(0, dtype=torch.int64) if eos is None else eos.reshape(-1)
        return [
            Request(
                prompt_T=prompt,
                num_padding=padding[number],
                config=config,
                rules=make_rules(
                    processors_of_row(logits_processor, number, len(prompts)),
                    stopping_criteria,
                    eos_ids.to(model.device),
                    config,
                    engine.target.vocab_size,
                ),
                stream=first_stream + number,
            )
            for number, prompt in enumerate(prompts)
        ]

    def _next_seed(self, do_sample: bool) -> int:
        if self.seed is not None or not do_sample:
            return self.seed or 0
        return int(torch.randint(2**62, ()))


def _refuse_unsupported(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    check_kind(model)
    if input_ids.shape[1] == 0:
        raise InputError("input_ids is empty: pass token ids (inputs_embeds alone cannot be decoded)")
    num_beams = int(config.num_beams or 1)
    if num_beams > 1 and int(config.num_return_sequences or 1) > num_beams:
        raise ConfigError(
            f"num_return_sequences is {config.num_return_sequences}: it must not exceed num_beams ({num_beams})"
        )
    refused = {
        "num_beam_groups": (getattr(config, "num_beam_groups", None) or 1) > 1,
        "constraints": bool(getattr(config, "constraints", None) or getattr(config, "force_words_ids", None)),
        "penalty_alpha": bool(getattr(config, "penalty_alpha", None)),
        "dola_layers": getattr(config, "dola_layers", None) is not None,
        "low_memory": bool(getattr(config, "low_memory", None)),
        "output_logits": bool(config.return_dict_in_generate and config.output_logits),
        "output_attentions": bool(config.return_dict_in_generate and config.output_attentions),
        "output_hidden_states": bool(config.return_dict_in_generate and config.output_hidden_states),
    }
    known = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
    refused.update({key: value is not None for key, value in model_kwargs.items() if key not in known})
    cache = model_kwargs.get("cache")
    refused["cache (filled)"] = cache is not None and cache.get_seq_length() > 0
    for processor in processors:
        if isinstance(processor, REFUSED_PROCESSORS):
            refused[type(processor).__name__] = True
    named = [name for name, present in refused.items() if present]
    if named:
        raise UnsupportedError(
            f"{', '.join(named)}: not supported by SpeculativeBeams; "
            "leave it out, or call generate without custom_generate"
        )


def _count_padding(prompts: torch.Tensor, attention_mask: torch.Tensor | None, num_beams: int) -> list[int]:
    """Left padding of each prompt, from the (expanded) attention mask.

    Raises:
        InputError: a mask with holes, or padding on the right.
    """
    if attention_mask is None:
        return [0] * prompts.shape[0]
    mask = attention_mask[::num_beams].to(torch.int64)
    padding = (mask.shape[1] - mask.sum(dim=1)).tolist()
    for number, (row, count) in enumerate(zip(mask, padding, strict=True)):
        if count and bool(row[:count].any()):
            raise InputError(f"prompt {number}: the attention mask has zeros after ones; pad on the left")
    return [int(count) for count in padding]
