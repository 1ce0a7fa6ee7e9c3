"""The reference: beam search or sampling by the target alone, with the same beam step and the same pool.

It is the engine without a drafter, so a block is one layer. Whatever drafts, the output must be this one's.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from .engine import Engine


def reference_engine(target: PreTrainedModel, rows: int = 1, measure: bool = False) -> Engine:
    """An engine that never drafts.

    Args:
        target: the target model.
        rows: prompts decoded at once.
        measure: keep wall-clock shares.
    """
    return Engine(target, drafter=None, rows=rows, measure=measure)
