"""The decoder: draft a forest, verify it in one target forward, commit; for several prompts at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from .beams import Beams, Candidates, FinishedBeams, Hypothesis, candidates_to_keep, top_candidates
from .compat import check_model
from .config import DecodeConfig
from .drafters import Drafter, Proposal
from .errors import InputError
from .forest import Forest
from .kv_pool import CausalModel, KVPool
from .noise import gumbel, root_path
from .rules import SearchRules
from .stats import DecodeStats, Stopwatch
from .verify import Verification, verify_coupled
from .widths import BlockPlanner, FixedWidth, LayerPlan, LayerView, WidthPolicy


@dataclass(frozen=True)
class Request:
    """One prompt to decode.

    Attributes:
        prompt_T: int64 (T,), token ids, left padding included.
        num_padding: how many of the first tokens are padding.
        config: the search asked for.
        rules: scoring and stopping.
        stream: number of the prompt in its call; tells the noise of equal prompts apart.
    """

    prompt_T: torch.Tensor
    num_padding: int
    config: DecodeConfig
    rules: SearchRules
    stream: int = 0


@dataclass(frozen=True)
class Result:
    """Outcome of one request: its hypotheses, best first (at most ``num_beams``), and what they cost."""

    hypotheses: list[Hypothesis]
    stats: DecodeStats


@dataclass(frozen=True)
class DraftedLayer:
    """One layer of a drafted forest: the plan, the candidates in the draft's order, the parents' number, features."""

    plan: LayerPlan
    candidates: Candidates
    first_node: int
    num_parents: int
    features: torch.Tensor | None


@dataclass
class Row:
    """A prompt in the pool."""

    index: int
    request: Request
    forest: Forest
    live: Beams
    finished: FinishedBeams
    stats: DecodeStats = field(default_factory=DecodeStats)

    @property
    def generated(self) -> int:
        """Tokens generated so far by every live beam."""
        return int(self.live.sequences_LT.shape[1] - self.request.prompt_T.shape[0])


@dataclass(frozen=True)
class BlockRecord:
    """What one block did to one prompt, for observers (traces, benchmarks)."""

    row: Row
    start: Beams
    layers: Sequence[DraftedLayer]
    verification: Verification


class Engine:
    """Speculative beam decoding of one target model.

    Args:
        target: the target model.
        drafter: proposes nodes; None decodes with the target alone.
        policy: decides depth and widths; without a drafter it is never asked.
        rows: prompts decoded at once.
        observer: called after every block of every prompt.
        measure: keep wall-clock shares (waits for the device at each boundary on a GPU).
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None = None,
        policy: WidthPolicy | None = None,
        rows: int = 1,
        observer: Callable[[BlockRecord], None] | None = None,
        measure: bool = False,
    ) -> None:
        self.target = CausalModel(target)
        check_model(self.target)
        self.drafter = drafter
        self.policy = policy if policy is not None else FixedWidth(gamma=0, draft_width=1)
        self.rows = rows
        self.observer = observer
        self.watch = Stopwatch(self.target.device, enabled=measure)
        self._pool: KVPool | None = None

    @torch.inference_mode()
    def decode(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Decode prompts; rows finish and leave, the next prompts enter.

        Args:
            requests: the prompts; taken as rows become free.

        Yields:
            (number of the request, its result), in the order in which they finish.

        Raises:
            InputError: a prompt is empty or too long, or too small a vocabulary for its beams.
            NumericalError: NaN logits.
        """
        queue = deque(enumerate(requests))
        for _, request in queue:
            self._check(request)
        if not queue:
            return
        capacity = max(self._slots_needed(request) for _, request in queue)
        self._pool = KVPool(self.target, min(self.rows, len(queue)), capacity)
        if self.drafter is not None:
            self.drafter.start(self._pool.rows, capacity)
        free = list(range(self._pool.rows))
        active: dict[int, Row] = {}  # request number -> row
        while queue or active:
            while queue and free:
                number, request = queue.popleft()
                active[number] = self._enter(free.pop(0), request)
            with self.watch.time("other"):
                self.step(list(active.values()))
            for number in [number for number, row in active.items() if row.finished.done]:
                row = active.pop(number)
                free.append(row.index)
                yield number, Result(row.finished.hypotheses, row.stats)

    def step(self, rows: Sequence[Row]) -> None:
        """One block: draft, verify in one target forward, commit."""
        rows = sorted(rows, key=lambda row: row.index)
        starts = [row.live for row in rows]
        drafts = self._draft(rows)
        logits = self._target_forward(rows)
        for row, start, layers, row_logits in zip(rows, starts, drafts, logits, strict=True):
            base = row.forest.size - row_logits.shape[0]
            verification = verify_coupled(
                start,
                row.forest,
                len(layers),
                lambda nodes, base=base, row_logits=row_logits: row_logits[nodes - base],  # type: ignore[misc]
                row.request.rules,
                row.finished,
                row.request.config.do_sample,
                row.request.prompt_T.shape[0],
            )
            self._commit(row, verification)
            if self.observer is not None:
                self.observer(BlockRecord(row, start, layers, verification))

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

    def _commit(self, row: Row, verification: Verification) -> None:
        """Make the verified beams live, drop dead branches, extend the trunk."""
        assert self._pool is not None
        row.stats.layers += len(verification.layers)
        row.live = verification.live
        if row.finished.done:
            self._pool.clear(row.index)
            if self.drafter is not None:
                self.drafter.clear(row.index)
            return
        pruning = row.forest.prune(row.live.nodes_L)
        self._pool.prune(row.index, pruning)
        if self.drafter is not None:
            self.drafter.prune(row.index, pruning)
        size, count = row.forest.size, len(row.live)
        nodes = torch.arange(size - count, size, device=self.target.device)
        row.live = Beams(row.live.scores_L, nodes, row.live.paths_L, row.live.sequences_LT)
        row.stats.peak_slots = max(row.stats.peak_slots, row.forest.num_slots)

    def _draft(self, rows: Sequence[Row]) -> list[list[DraftedLayer]]:
        """Draft a forest above each row's live beams, layer by layer, as its policy plans."""
        drafts: list[list[DraftedLayer]] = [[] for _ in rows]
        if self.drafter is None:
            return drafts
        frontiers = {
            number: _Frontier(row, row.live, self.policy.start_block(row.request.config.num_beams))
            for number, row in enumerate(rows)
            if row.request.config.max_new_tokens - row.generated > 1
        }
        layer = 0
        while frontiers:
            stage = _Stage(self, list(frontiers.values()))
            plans: dict[int, LayerPlan] = {}
            for number, frontier in frontiers.items():
                plan = frontier.plan(layer, stage)
                if plan is None:
                    stage.drop(frontier)
                else:
                    plans[number] = plan
            for number, plan in plans.items():
                drafted = stage.draw(frontiers[number], plan)
                if drafted is not None:
                    drafts[number].append(drafted)
                    rows[number].stats.drafted_nodes += len(drafted.candidates)
            layer += 1
            frontiers = {
                number: frontiers[number]
                for number in plans
                if len(drafts[number]) == layer
                and rows[number].request.config.max_new_tokens - rows[number].generated > layer + 1
            }
        return drafts

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
        finished = FinishedBeams(
            config.num_beams, config.length_penalty, config.early_stopping, config.max_new_tokens
        )
        return Row(index, request, forest, live, finished)

    def _slots_needed(self, request: Request) -> int:
        """Slots for the whole prompt and output, with room for wide forests; the pool grows where that is too little."""
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
        keep = candidates_to_keep(config.num_beams, config.num_beams, request.rules.n_eos)
        if keep > self.target.vocab_size:
            raise InputError(
                f"num_beams={config.num_beams} needs {keep} candidates per step, but the vocabulary has "
                f"{self.target.vocab_size} tokens: use fewer beams"
            )


@dataclass
class _Frontier:
    """The last drafted layer of a row, and the planner of its block."""

    row: Row
    beams: Beams
    planner: BlockPlanner

    def plan(self, layer: int, stage: _Stage) -> LayerPlan | None:
        num_beams = self.row.request.config.num_beams
        view = LayerView(layer, num_beams, len(self.beams), lambda: stage.features(self, layer))
        return self.planner.next_layer(view)


class _Stage:
    """One drafted layer of all rows. The drafter runs at most once, on first demand, for every row not yet dropped."""

    def __init__(self, engine: Engine, frontiers: list[_Frontier]) -> None:
        self._engine = engine
        self._frontiers = frontiers
        self._log_probs: dict[int, tuple[torch.Tensor, Proposal]] | None = None

    def drop(self, frontier: _Frontier) -> None:
        """A row that drafts no further."""
        self._frontiers = [other for other in self._frontiers if other is not frontier]

    def features(self, frontier: _Frontier, layer: int) -> torch.Tensor:
        raise NotImplementedError

    def log_probs(self, frontier: _Frontier) -> tuple[torch.Tensor, Proposal]:
        """The draft's processed log-probabilities at the frontier, float32 (P, Vd), and its proposal."""
        if self._log_probs is None:
            assert self._engine.drafter is not None
            rows = [other.row for other in self._frontiers]
            with self._engine.watch.time("draft"):
                proposals = self._engine.drafter.propose(
                    [row.index for row in rows],
                    [row.forest for row in rows],
                    [other.beams.sequences_LT for other in self._frontiers],
                )
            self._log_probs = {}
            for other, proposal in zip(self._frontiers, proposals, strict=True):
                rules = other.row.request.rules.draft
                log_probs = rules.log_probs(other.beams.sequences_LT, proposal.logits_PV, proposal.token_ids_V)
                self._log_probs[other.row.index] = (log_probs, proposal)
                other.row.stats.draft_forwards += 1
        return self._log_probs[frontier.row.index]

    def draw(self, frontier: _Frontier, plan: LayerPlan) -> DraftedLayer | None:
        """Draw the layer's candidates and add them to the forest; None where the drafter proposes nothing."""
        log_probs, proposal = self.log_probs(frontier)
        beams, row = frontier.beams, frontier.row
        token_ids = proposal.token_ids_V
        columns = torch.arange(log_probs.shape[1], device=log_probs.device) if token_ids is None else token_ids
        noise = gumbel(beams.paths_L, columns) if row.request.config.do_sample else None
        log_probs = log_probs.masked_fill(torch.isin(columns, row.request.rules.eos_ids), float("-inf"))
        candidates = top_candidates(beams.scores_L, log_probs, noise, plan.draft_width, token_ids)
        finite = int((candidates.scores_K > float("-inf")).sum())  # excluded ones come last
        if finite == 0:
            return None
        if finite < len(candidates):
            candidates = candidates.pick(torch.arange(finite, device=log_probs.device))
        nodes = row.forest.add(beams.nodes_L[candidates.parents_K], candidates.tokens_K)
        frontier.beams = beams.advance(candidates.parents_K, candidates.tokens_K, candidates.scores_K, nodes)
        return DraftedLayer(plan, candidates, row.forest.size - finite, len(beams), None)
