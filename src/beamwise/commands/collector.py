"""What decodes prompts for `beamwise collect`, in this process or in an actor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from beamwise.decoding.prompts import Prompt, encode_prompt

from .loading import load_models, silence_libraries

if TYPE_CHECKING:
    import pyarrow as pa

    from beamwise.decoding.trace_log import TraceLog

    from .collect import CollectOptions
    from .loading import Models

Todo = list[tuple[int, Prompt]]
"""Prompts still to decode, with their indices in the whole list."""


@dataclass(frozen=True)
class Decoded:
    """One prompt's traces.

    Attributes:
        index: of the prompt in the whole list.
        prompt: its id.
        layers: its layer rows.
        blocks: its block rows.
    """

    index: int
    prompt: str
    layers: pa.Table
    blocks: pa.Table


class Collector:
    """Decodes prompts one at a time; each depends on its index and the seed alone, so runs can be cut and joined."""

    def __init__(self, models: Models, options: CollectOptions) -> None:
        from beamwise.decoding.generate import SpeculativeBeams
        from beamwise.decoding.trace_log import TraceLog

        self.models = models
        self.options = options
        self.log = TraceLog()
        self.beams = SpeculativeBeams(
            models.draft,
            drafter=options.drafter,
            observer=self.log,
            measure=True,
            batch_size=1,
            verification=options.verification,
        )

    @classmethod
    def load(cls, options: CollectOptions) -> Collector:
        """With the models that the options name.

        Raises:
            ModelError: a model that cannot be loaded or paired.
        """
        silence_libraries()
        return cls(load_models(options.target, options.draft, options.drafter, options.dtype, options.device), options)

    def decode(self, index: int, prompt: Prompt) -> TraceLog:
        """Decode a prompt; the log holds its rows until the next one."""
        import torch

        from beamwise.decoding.widths import RandomWidth

        options = self.options
        turn = index // len(options.num_beams) % 2 == 1
        do_sample = options.sampling == "sample" or (options.sampling == "both" and turn)
        self.beams.policy = RandomWidth(options.gamma, tuple(options.draft_widths), options.seed * 1_000_003 + index)
        self.beams.seed = options.seed * 1_000_003 + index
        self.log.begin()
        ids = torch.tensor([encode_prompt(self.models.tokenizer, prompt.text)], device=self.models.target.device)
        sampling: dict[str, Any] = {"temperature": options.temperature, "top_k": options.top_k} if do_sample else {}
        self.models.target.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=options.num_beams[index % len(options.num_beams)],
            do_sample=do_sample,
            max_new_tokens=options.max_new_tokens,
            custom_generate=self.beams,
            **sampling,
        )
        return self.log

    def traces(self, index: int, prompt: Prompt) -> Decoded:
        """Decode a prompt.

        Returns:
            Its rows as tables.
        """
        from beamwise.decoding.trace_tables import prompt_tables

        log = self.decode(index, prompt)
        return Decoded(index, prompt.id, *prompt_tables(self.options.run, prompt.id, log.layer_rows, log.block_rows))

    def stream(self, todo: Todo) -> Generator[Decoded]:
        """Decode prompts in order."""
        for index, prompt in todo:
            yield self.traces(index, prompt)


@contextmanager
def process_executor(options: CollectOptions) -> Iterator[Callable[[Todo], Generator[Decoded]]]:
    """Decodes in this process; the models are loaded on entering.

    Raises:
        ModelError: a model that cannot be loaded or paired.
    """
    yield Collector.load(options).stream
