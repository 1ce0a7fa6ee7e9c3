"""What ``generate`` returns: sequences padded to the longest, in transformers' own output classes."""

from __future__ import annotations

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from .finished import Hypothesis

_UNFINISHED_SCORE = -1.0e9  # transformers' score of a hypothesis that never finished


def pad_hypotheses(hypotheses: list[Hypothesis], prompt: torch.Tensor, count: int) -> list[Hypothesis]:
    """The best ``count``; where the search ended with fewer, the bare prompt fills up, as in transformers."""
    missing = count - len(hypotheses)
    return hypotheses[:count] + [Hypothesis(prompt, _UNFINISHED_SCORE)] * max(missing, 0)


def pack(
    hypotheses: list[Hypothesis], prompts: torch.Tensor, config: GenerationConfig, eos_ids: torch.Tensor
) -> torch.Tensor | GenerateBeamDecoderOnlyOutput | GenerateDecoderOnlyOutput:
    """Sequences padded to the longest, and transformers' output classes."""
    single = int(config.num_beams or 1) == 1
    pad = getattr(config, "_pad_token_tensor", None)
    if single:
        fill = int(pad) if pad is not None else 0  # without a pad token nothing ever stops early
    elif eos_ids.numel() == 0:
        fill = -1
    else:  # as transformers has it: `pad_token_id or eos_token_id[0]`, so that a pad token 0 does not count
        fill = int(pad) if pad is not None and int(pad) != 0 else int(eos_ids[0])
    longest = max(hypothesis.sequence_T.shape[0] for hypothesis in hypotheses)
    sequences = prompts.new_full((len(hypotheses), longest), fill)
    for row, hypothesis in enumerate(hypotheses):
        sequences[row, : hypothesis.sequence_T.shape[0]] = hypothesis.sequence_T
    if not config.return_dict_in_generate:
        return sequences
    if single:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    scores = torch.tensor([hypothesis.score for hypothesis in hypotheses], device=sequences.device)
    return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=scores)  # type: ignore[arg-type]
