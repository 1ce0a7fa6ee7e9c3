"""Drafting: grow a forest above the live beams of each prompt, layer by layer, as its width policy plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from .beams import Beams, Candidates, top_candidates
from .drafters import Drafter, Proposal
from .features import FeatureInputs, context_features, layer_features
from .host import read, reads_are_free
from .noise import extend_path, gumbel_where, private_path
from .rows import Row
from .stats import Stopwatch
from .widths import AskingPlanner, BlockPlanner, LayerPlan, LayerView, Question, WidthPolicy


@dataclass(frozen=True)
class DraftedLayer:
    """One layer of a drafted forest.

    Attributes:
        plan: the widths asked for.
        candidates: in the draft's order; candidate i is node ``first_node + i``.
        first_node: of the layer.
        num_parents: nodes that the candidates extend.
        view: what the policy could see; its features are computed on demand, until the block is committed.
        weigh: gives the draft's unnormalised log-probabilities over (parent, column), float32 (P, Vd).
        token_ids_V: the target's token id of each of its columns, int64 (Vd,); None where they are the same.
    """

    plan: LayerPlan
    candidates: Candidates
    first_node: int
    num_parents: int
    view: LayerView
    weigh: Callable[[], torch.Tensor]
    token_ids_V: torch.Tensor | None


def draft_forests(
    rows: Sequence[Row], drafter: Drafter, policy: WidthPolicy, watch: Stopwatch
) -> list[list[DraftedLayer]]:
    """Draft one block for several prompts; their drafter forwards are batched.

    The last token allowed is never drafted: the layer after the drafted ones is free.

    Args:
        rows: the prompts; drafted nodes are added to their forests.
        drafter: proposes the nodes.
        policy: decides how deep and wide.
        watch: keeps the time of the drafter's forwards.

    Returns:
        For each row, its drafted layers.
    """
    drafts: list[list[DraftedLayer]] = [[] for _ in rows]
    frontiers = {
        number: _Frontier(row, row.live, policy.start_block(row.request.config.num_beams))
        for number, row in enumerate(rows)
        if row.remaining > 1 and not (drafter.needs_target_states and row.history.blocks == 0)
    }
    layer = 0
    while frontiers:
        stage = _Stage(drafter, watch, list(frontiers.values()))
        questions: dict[int, Question] = {}
        for number, frontier in frontiers.items():
            question = frontier.ask(layer, stage)
            if question is None:
                stage.drop(frontier)
            else:
                questions[number] = question
        layer += 1
        drawn = {number: stage.draw(frontiers[number], question.draft_width) for number, question in questions.items()}
        plans = _decide(questions, drawn)
        for number in questions.keys() - plans.keys():
            stage.drop(frontiers[number])
        going = {}
        for number, (plan, candidates) in plans.items():
            drafted = stage.grow(frontiers[number], plan, candidates)
            if drafted is not None:
                drafts[number].append(drafted)
                rows[number].stats.drafted_nodes += len(drafted.candidates)
                if rows[number].remaining > layer + 1:
                    going[number] = frontiers[number]
        frontiers = going
    return drafts


@dataclass
class _Frontier:
    """The last drafted layer of a row, and the planner of its block."""

    row: Row
    beams: Beams
    planner: BlockPlanner
    view: LayerView | None = None
    """Of the layer last planned."""

    def ask(self, layer: int, stage: _Stage) -> Question | None:
        """What to read before the layer's plan is known; nothing where it is known already. None stops here."""
        num_beams = self.row.request.config.num_beams
        state = self._state(layer)
        context = cache(lambda: context_features(state()))
        view = self.view = LayerView(
            layer,
            num_beams,
            len(self.beams),
            context,
            lambda: layer_features(state(), stage.log_probs(self)[0], context()),
            self.row.generated,
            self.row.history.outcomes,
            self.row.notes,
        )
        if isinstance(self.planner, AskingPlanner) and not reads_are_free(self.row.forest.device):
            return self.planner.ask(view)
        plan = self.planner.next_layer(view)
        return None if plan is None else Question((), plan.draft_width, lambda _: plan)

    def _state(self, layer: int) -> Callable[[], FeatureInputs]:
        """The layer's state for the features. Made on demand, since most policies do not look, of what is known now."""
        request, live, parents, history = self.row.request, self.row.live, self.beams, self.row.history
        position, num_finished = self.row.generated, len(self.row.finished.hypotheses)
        return lambda: FeatureInputs(
            layer=layer,
            num_beams=request.config.num_beams,
            position=position,
            prompt_length=request.prompt_T.shape[0] - request.num_padding,
            do_sample=request.config.do_sample,
            num_finished=num_finished,
            recent_acceptance=history.acceptance,
            parent_scores_P=parents.scores_L,
            root_scores_L=live.scores_L,
        )


class _Stage:
    """One drafted layer of all rows. The drafter runs at most once, on first demand, for every row not yet dropped."""

    def __init__(self, drafter: Drafter, watch: Stopwatch, frontiers: list[_Frontier]) -> None:
        self._drafter = drafter
        self._watch = watch
        self._frontiers = frontiers
        self._log_probs: dict[int, tuple[torch.Tensor, Proposal]] | None = None
        self._weights: dict[int, Callable[[], torch.Tensor]] = {}

    def drop(self, frontier: _Frontier) -> None:
        """A row that drafts no further."""
        frontier.view = None  # see `grow`
        self._frontiers = [other for other in self._frontiers if other is not frontier]

    def log_probs(self, frontier: _Frontier) -> tuple[torch.Tensor, Proposal]:
        """The draft's processed log-probabilities at the frontier, float32 (P, Vd), and its proposal."""
        if self._log_probs is None:
            rows = [other.row for other in self._frontiers]
            with self._watch.time("draft"):
                proposals = self._drafter.propose(
                    [row.index for row in rows],
                    [row.forest for row in rows],
                    [other.beams.sequences_LT for other in self._frontiers],
                )
            self._log_probs = {}
            for other, proposal in zip(self._frontiers, proposals, strict=True):
                rules = other.row.request.rules.draft
                log_probs = proposal.logits_PV
                if log_probs.shape[1]:
                    log_probs = rules.log_probs(other.beams.sequences_LT, log_probs, proposal.token_ids_V)
                    # a beam without proposals, or a broken draft: the target decides there alone
                    # and an end is never extended, so it is not proposed
                    ends = (_columns(proposal) == other.row.request.rules.eos_ids.unsqueeze(1)).any(dim=0)
                    log_probs = log_probs.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
                    log_probs.masked_fill_(ends, float("-inf"))
                self._log_probs[other.row.index] = (log_probs, proposal)
                other.row.stats.draft_forwards += 1
        return self._log_probs[frontier.row.index]

    def draw(self, frontier: _Frontier, draft_width: int) -> Candidates:
        """The layer's first candidates, excluded ones (-inf) last; none where the drafter proposes nothing."""
        log_probs, proposal = self.log_probs(frontier)
        beams, row = frontier.beams, frontier.row
        if log_probs.shape[1] == 0:  # a lookup that matched nothing
            none = torch.empty(0, dtype=torch.int64, device=log_probs.device)
            return Candidates(log_probs.new_empty(0), log_probs.new_empty(0), none, none)
        return top_candidates(
            beams.scores_L,
            log_probs,
            _draft_noise(row, beams, _columns(proposal), log_probs),
            draft_width,
            proposal.token_ids_V,
            self._weigh(frontier)() if row.request.config.rejection else None,
        )

    def grow(self, frontier: _Frontier, plan: LayerPlan, candidates: Candidates) -> DraftedLayer | None:
        """Add candidates, all finite, to the forest; None where there are none."""
        # the view holds the frontier: a circle would keep the layer's tensors until garbage is collected
        view, frontier.view = frontier.view, None
        if not len(candidates):
            return None
        proposal = self.log_probs(frontier)[1]
        beams, row = frontier.beams, frontier.row
        nodes = row.forest.add(beams.nodes_L[candidates.parents_K], candidates.tokens_K)
        weigh = self._weigh(frontier)
        frontier.beams = beams.advance(candidates.parents_K, candidates.tokens_K, candidates.scores_K, nodes)
        assert view is not None
        first = row.forest.size - len(candidates)
        return DraftedLayer(plan, candidates, first, len(beams), view, weigh, proposal.token_ids_V)

    def _weigh(self, frontier: _Frontier) -> Callable[[], torch.Tensor]:
        """Gives the draft's unnormalised log-probabilities over (parent, column) at the frontier; computed once."""
        number = frontier.row.index
        if number not in self._weights:
            rules, log_probs = frontier.row.request.rules.draft, self.log_probs(frontier)[0]
            self._weights[number] = cache(partial(rules.log_weights, frontier.beams.scores_L, log_probs))
        return self._weights[number]


def _decide(
    questions: Mapping[int, Question], drawn: Mapping[int, Candidates]
) -> dict[int, tuple[LayerPlan, Candidates]]:
    """The plans of a layer, and its candidates that are not excluded, by one read for all rows.

    A row that stops here has neither.
    """
    if not questions:
        return {}
    counts = [(drawn[number].ranks_K > float("-inf")).sum() for number in questions]
    values = read(counts + [tensor for question in questions.values() for tensor in question.tensors])
    answers = iter(values[len(counts) :])
    plans = {}
    for (number, question), (count,) in zip(questions.items(), values[: len(counts)], strict=True):
        plan = question.decide([next(answers) for _ in question.tensors])
        if plan is not None:
            plans[number] = plan, drawn[number].first(min(int(count), plan.draft_width))
    return plans


def _draft_noise(row: Row, beams: Beams, tokens_V: torch.Tensor, log_probs_PV: torch.Tensor) -> torch.Tensor | None:
    """Gumbel noise of the draft's candidates, (P, Vd), or None to take the best ones.

    Coupled verification shares it with the target. Rejection verification needs fresh draws for every block and parent,
    even where two parents hold the same text.
    """
    if not row.request.config.do_sample:
        return None
    if not row.request.config.rejection:
        return gumbel_where(beams.paths_L, tokens_V, log_probs_PV)
    numbers = torch.arange(len(beams), device=tokens_V.device)
    paths = extend_path(private_path(beams.paths_L, row.history.blocks), numbers)
    return gumbel_where(paths, tokens_V, log_probs_PV)


def _columns(proposal: Proposal) -> torch.Tensor:
    """The target's token id of each column of a proposal, int64 (Vd,)."""
    if proposal.token_ids_V is not None:
        return proposal.token_ids_V
    return torch.arange(proposal.logits_PV.shape[1], device=proposal.logits_PV.device)
