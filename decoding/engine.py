"""The decoder: draft a forest, verify it in one target forward, commit; for several prompts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedModel

from .beams import Beams, candidates_to_keep
from .causal import CausalModel
from .compat import check_model
from .drafters import Drafter
from .drafting import DraftedLayer, draft_forests
from .errors import InputError
from .finished import FinishedBeams
from .forest import Forest
from .kv_pool import KVPool, renew_pool
from .noise import root_path
from .outcome import Verification
from .rows import History, Request, Result, Row
from .stats import Stopwatch
from .verify import Block, verify
from .widths import FixedWidth, WidthPolicy


@dataclass(frozen=True)
class BlockRecord:
    """What one block did to one prompt, for observers (traces, benchmarks).

    Attributes:
        row: the prompt, after the block.
        start: its live beams before.
        layers: what was drafted.
        verification: what became of it.
        target_tokens: tokens that the target computed for it.
        seconds: wall clock of the block by part (draft, target, other), of all its prompts together; empty unless the
            engine measures.
    """

    row: Row
    start: Beams
    layers: Sequence[DraftedLayer]
    verification: Verification
    target_tokens: int
    seconds: dict[str, float]


class Engine:
    """Speculative beam decoding of one target model.

    Args:
        target: the target model.
        drafter: proposes nodes; None decodes with the target alone.
        policy: decides depth and widths; without a drafter it is never asked.
        rows: prompts decoded at once.
        observer: called after every block of every prompt.
        measure: keep wall-clock shares (waits for the device at each boundary on a GPU).
        pack_weights: see `CausalModel`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None = None,
        policy: WidthPolicy | None = None,
        rows: int = 1,
        observer: Callable[[BlockRecord], None] | None = None,
        measure: bool = False,
        pack_weights: bool = True,
    ) -> None:
        self.target = CausalModel(target, pack_weights)
        check_model(self.target)
        self.drafter = drafter
        self.policy = policy if policy is not None else FixedWidth(gamma=0, draft_width=1)
        self.rows = rows
        self.observer = observer
        self.watch = Stopwatch(self.target.device, enabled=measure)
        self._pool: KVPool | None = None
        self._busy = False

    @property
    def pool(self) -> KVPool | None:
        """KV storage of the target; None before the first prompt."""
        return self._pool

    @torch.inference_mode()
    def decode(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Decode prompts; rows finish and leave, the next prompts enter.

        Args:
            requests: the prompts. A list is checked at once; an iterator is asked for the next one as a row
                becomes free.
                How the models are run (`DecodeConfig.runner`) is the first one's choice.

        Yields:
            (number of the request, its result), in the order in which they finish.

        Raises:
            ConfigError: the runner cannot be had on this device.
            InputError: a prompt is empty or too long, or too small a vocabulary for its beams; or another call on this
                engine has not ended.
            NumericalError: NaN logits.
        """
        if self._busy:
            raise InputError("This decoder is in the middle of other prompts: exhaust or close that iterator first")
        self._busy = True
        try:
            yield from self._decode(requests)
        finally:
            self._busy = False

    def _decode(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        arrivals: Iterator[tuple[int, Request]] = enumerate(requests)
        first = next(arrivals, None)
        if first is None:
            return
        known = requests if isinstance(requests, Sequence) else None
        for request in known or [first[1]]:
            self._check(request)
        rows = self.rows if known is None else min(self.rows, len(known))
        self._prepare(rows, known or [first[1]])
        arrivals = chain([first], arrivals)
        free = list(range(rows))
        active: dict[int, Row] = {}  # request number -> row
        while True:
            while free and (arrival := next(arrivals, None)) is not None:
                number, request = arrival
                if known is None:
                    self._check(request)
                active[number] = self._enter(free.pop(0), request)
            if not active:
                return
            self.step(list(active.values()))
            for number in [number for number, row in active.items() if row.finished.done]:
                row = active.pop(number)
                free = sorted([*free, row.index])  # low rows first: static shapes cover the rows up to the last one
                yield number, Result(row.finished.hypotheses, row.stats)

    def _prepare(self, rows: int, requests: Sequence[Request]) -> None:
        """Make room for so many prompts; later ones may be longer than these."""
        runner = requests[0].config.runner
        capacity = max(self._slots_needed(request) for request in requests)
        self._pool = renew_pool(self._pool, self.target, rows, capacity, runner=runner)
        self._pool.sink = None
        if self.drafter is not None:
            self.drafter.start(rows, capacity, runner)
            self._pool.sink = self.drafter.observe if self.drafter.needs_target_states else None

    def step(self, rows: Sequence[Row]) -> None:
        """One block: draft, verify in one target forward, commit."""
        before = dict(self.watch.seconds)
        rows = sorted(rows, key=lambda row: row.index)
        with self.watch.time("other"):
            starts = [row.live for row in rows]
            tokens = [row.stats.target_tokens for row in rows]
            drafts = self._draft(rows)
            logits = self._target_forward(rows)
            verifications = self._verify(rows, drafts, logits)
        if self.observer is None:
            return
        seconds = {part: total - before.get(part, 0.0) for part, total in self.watch.seconds.items()}
        for row, start, layers, verification, old in zip(rows, starts, drafts, verifications, tokens, strict=True):
            computed = row.stats.target_tokens - old
            self.observer(BlockRecord(row, start, layers, verification, computed, seconds))

    def _verify(
        self, rows: Sequence[Row], drafts: Sequence[Sequence[DraftedLayer]], logits: Sequence[torch.Tensor]
    ) -> list[Verification]:
        """Verify and commit every row's block."""
        blocks = [
            Block(row, layers, row_logits, row.forest.size - row_logits.shape[0])
            for row, layers, row_logits in zip(rows, drafts, logits, strict=True)
        ]
        verifications = verify(blocks)
        for block, verification in zip(blocks, verifications, strict=True):
            self._commit(block.row, len(block.layers), verification)
        return verifications

    def _target_forward(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Logits of every live and drafted node of each row."""
        assert self._pool is not None
        wanted = []
        for row in rows:
            pending = self._pool.pending(row.index, row.forest)
            wanted.append(min(pending, row.forest.size))
            row.stats.target_forwards += 1
            row.stats.target_tokens += pending
        with self.watch.time("target"):
            return self._pool.forward([row.index for row in rows], [row.forest for row in rows], wanted)

    def _commit(self, row: Row, drafted: int, verification: Verification) -> None:
        """Make the verified beams live, drop dead branches, extend the trunk."""
        assert self._pool is not None
        row.stats.layers += len(verification.layers)
        row.stats.widths += sum(layer.width for layer in verification.layers)
        row.live = verification.live.best(row.request.config.carry_beams)
        outcomes = tuple(layer.covered for layer in verification.layers if layer.drafted)
        row.history = row.history.updated(drafted, outcomes)
        if row.finished.done:
            self._pool.clear(row.index)
            if self.drafter is not None:
                self.drafter.clear(row.index)
            return
        known = verification.known
        if known is not None:
            known = known[0], known[1][: len(row.live)]
        pruning = row.forest.prune(row.live.nodes_L, known)
        self._pool.prune(row.index, pruning)
        if self.drafter is not None:
            self.drafter.prune(row.index, pruning)
        size, count = row.forest.size, len(row.live)
        nodes = torch.arange(size - count, size, device=self.target.device)
        row.live = Beams(row.live.scores_L, nodes, row.live.paths_L, row.live.sequences_LT)
        row.stats.peak_slots = max(row.stats.peak_slots, row.forest.num_slots)

    def _draft(self, rows: Sequence[Row]) -> list[list[DraftedLayer]]:
        if self.drafter is None:
            return [[] for _ in rows]
        return draft_forests(rows, self.drafter, self.policy, self.watch)

    def _enter(self, index: int, request: Request) -> Row:
        device = self.target.device
        config = request.config
        prompt = request.prompt_T.to(device)
        tokens = prompt[request.num_padding :]
        forest = Forest(tokens[:-1], device, capacity=64 + 8 * config.num_beams)
        live = Beams(
            scores_L=torch.zeros(1, device=device),
            nodes_L=forest.add_root(tokens[-1:]),
            paths_L=root_path(config.seed, request.stream, device),
            sequences_LT=prompt.unsqueeze(0),
        )
        finished = FinishedBeams(config.num_beams, config.length_penalty, config.early_stopping, config.max_new_tokens)
        return Row(index, request, forest, live, finished, History())

    def _slots_needed(self, request: Request) -> int:
        """Slots for the whole prompt and output, and room for wide forests; the pool grows where that is too little."""
        length = int(request.prompt_T.shape[0]) - request.num_padding + request.config.max_new_tokens
        return length + 16 * request.config.num_beams

    def _check(self, request: Request) -> None:
        config, length = request.config, int(request.prompt_T.shape[0]) - request.num_padding
        if length < 1:
            raise InputError("The prompt is empty: give at least one token (many tokenizers need a BOS token)")
        text_config = self.target.model.config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
        if positions is not None and length + config.max_new_tokens > positions:
            raise InputError(
                f"The prompt has {length} tokens and max_new_tokens is {config.max_new_tokens}, but the model has "
                f"{positions} positions: shorten the prompt or ask for at most {max(positions - length, 0)} new tokens"
            )
        keep = config.num_beams
        if not config.rejection:
            keep = candidates_to_keep(keep, keep, request.rules.n_eos)
        if keep > self.target.vocab_size:
            raise InputError(
                f"num_beams={config.num_beams} needs {keep} candidates per step, but the vocabulary has "
                f"{self.target.vocab_size} tokens: use fewer beams"
            )
