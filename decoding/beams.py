"""The beam step: the one place where beams are chosen, and the bookkeeping of finished hypotheses.

The step has two halves, one on the device and one on the host, so that the host need not wait between them. It follows
transformers 5.24's ``_beam_search`` rule by rule (and ``_sample`` where ``num_beams`` is 1); the draft, the
verification and the reference all call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import noise as noise_lib
from .errors import NumericalError
from .host import upload
from .topk import topk_rows

NAN_LOGITS = "The model returned NaN logits: check its weights and dtype (float16 overflows easily; try bfloat16)"


@dataclass(frozen=True)
class Beams:
    """Beams of one prompt at one layer, best first. L beams of equal length.

    Attributes:
        scores_L: float32 (L,), accumulated (processed) log-probabilities.
        nodes_L: int64 (L,), their nodes in the forest.
        paths_L: int64 (L,), path hashes (`noise`).
        sequences_LT: int64 (L, T), token ids, prompt with its padding included, as logits processors expect.
    """

    scores_L: torch.Tensor
    nodes_L: torch.Tensor
    paths_L: torch.Tensor
    sequences_LT: torch.Tensor

    def __len__(self) -> int:
        return int(self.scores_L.shape[0])

    def best(self, count: int | None) -> Beams:
        """The first ``count`` beams; None is all."""
        return Beams(self.scores_L[:count], self.nodes_L[:count], self.paths_L[:count], self.sequences_LT[:count])

    def advance(
        self, parents_K: torch.Tensor, tokens_K: torch.Tensor, scores_K: torch.Tensor, nodes_K: torch.Tensor
    ) -> Beams:
        """The beams after K of their continuations were chosen.

        Args:
            parents_K: int64 (K,), index of the beam that each continuation extends.
            tokens_K: int64 (K,), its token.
            scores_K: float32 (K,), its accumulated score.
            nodes_K: int64 (K,), its node in the forest.
        """
        return Beams(
            scores_L=scores_K,
            nodes_L=nodes_K,
            paths_L=noise_lib.extend_path(self.paths_L[parents_K], tokens_K),
            sequences_LT=torch.cat([self.sequences_LT[parents_K], tokens_K.unsqueeze(1)], dim=1),
        )


@dataclass(frozen=True)
class Candidates:
    """Continuations in some order. K candidates.

    Attributes:
        scores_K: float32 (K,), accumulated scores.
        ranks_K: float32 (K,), what they were chosen by: score plus noise, or the score itself without noise.
        parents_K: int64 (K,), index of the extended beam.
        tokens_K: int64 (K,), token ids of the target's vocabulary.
    """

    scores_K: torch.Tensor
    ranks_K: torch.Tensor
    parents_K: torch.Tensor
    tokens_K: torch.Tensor

    def __len__(self) -> int:
        return int(self.scores_K.shape[0])

    def first(self, count: int) -> Candidates:
        """The first ``count`` candidates."""
        if count == len(self):
            return self
        return Candidates(self.scores_K[:count], self.ranks_K[:count], self.parents_K[:count], self.tokens_K[:count])

    def pick(self, index: torch.Tensor) -> Candidates:
        """The candidates at ``index``, int64 (J,), in that order."""
        return Candidates(self.scores_K[index], self.ranks_K[index], self.parents_K[index], self.tokens_K[index])


def candidates_to_keep(width: int, num_beams: int, n_eos: int) -> int:
    """Candidates that one beam step considers: transformers' ``beams_to_keep``, or 1 where no beams were asked for."""
    return 1 if num_beams == 1 else max(2, 1 + n_eos) * width


def top_candidates(
    scores_L: torch.Tensor,
    log_probs_LV: torch.Tensor,
    noise_LV: torch.Tensor | None,
    count: int,
    token_ids_V: torch.Tensor | None = None,
    log_weights_LV: torch.Tensor | None = None,
) -> Candidates:
    """The ``count`` best continuations over (beam x vocabulary), in the order in which they are drawn.

    With noise this is Gumbel-top-k: an ordered draw without replacement from the softmax of the accumulated scores
    (Kool et al. 2019), the law of transformers' ``multinomial`` over the same softmax. Without noise it is plain top-k.

    Args:
        scores_L: float32 (L,), accumulated scores of the beams.
        log_probs_LV: float32 (L, V), processed log-probabilities; -inf excludes a token.
        noise_LV: float32 (L, V) Gumbel noise, or None for a greedy step.
        count: candidates wanted; fewer come back where the vocabulary is smaller.
        token_ids_V: int64 (V,), the target's token id of each column; None where they are the same.
        log_weights_LV: float32 (L, V), unnormalised log-probabilities to draw by, where they are not the scores.

    Returns:
        Candidates in decreasing rank. Excluded continuations (-inf) come last and are not filtered.
    """
    vocab = log_probs_LV.shape[1]
    accumulated = (log_probs_LV + scores_L.unsqueeze(1)).view(-1)
    weights = accumulated if log_weights_LV is None else log_weights_LV.view(-1)
    ranks = weights if noise_LV is None else weights + noise_LV.reshape(-1)
    best, places = topk_rows(ranks.unsqueeze(0), min(count, ranks.shape[0]))
    best, places = best[0], places[0]
    parents = places.div(vocab, rounding_mode="floor")
    columns = places - parents * vocab
    tokens = columns if token_ids_V is None else token_ids_V[columns]
    scores = best if noise_LV is None else accumulated[places]
    return Candidates(scores, best, parents, tokens)


@dataclass(frozen=True)
class Selection:
    """Outcome of one beam step.

    Attributes:
        drawn: the finite candidates considered, in the order in which they were drawn.
        scores: their scores, on the host.
        stopped: for each, whether it met a stopping criterion.
        live_index: indices into ``drawn`` of the (at most ``width``) unfinished ones that live on, best score first.
        live: those candidates.
        finished_index: indices of those that end here and stand inside the first ``width`` by score, best first.
        finished: those candidates.
        exhausted: every candidate met a stopping criterion: the search cannot continue.
    """

    drawn: Candidates
    scores: list[float]
    stopped: list[bool]
    live_index: list[int]
    live: Candidates
    finished_index: list[int]
    finished: Candidates
    exhausted: bool

    def narrowed(self, width: int, keep: int) -> list[int]:
        """Indices (into ``drawn``) of the beams that a step of smaller width, with the same noise, lets live on."""
        return _split(self.scores[:keep], self.stopped[:keep], width)[0]

    def at_width(self, width: int, keep: int) -> Selection:
        """The outcome of a step of smaller width with the same noise; ``keep`` from `candidates_to_keep`."""
        return make_selection(self.drawn, self.scores, self.stopped, width, keep)


def make_selection(
    drawn: Candidates, scores: list[float], stopped: list[bool], width: int, keep: int | None = None
) -> Selection:
    """Sort out the first ``keep`` (None: all) of the candidates drawn into live and finished beams.

    Args:
        drawn: finite candidates in the order in which they were drawn.
        scores: their scores, on the host.
        stopped: for each, whether it met a stopping criterion.
        width: beams to keep.
        keep: how many of ``drawn`` were considered.
    """
    going, ending = _split(scores[:keep], stopped[:keep], width)
    index = upload(going + ending, drawn.scores_K.device)
    return Selection(
        drawn=drawn,
        scores=scores,
        stopped=stopped,
        live_index=going,
        live=drawn.pick(index[: len(going)]),
        finished_index=ending,
        finished=drawn.pick(index[len(going) :]),
        exhausted=not going,
    )


def _split(scores: list[float], stopped: list[bool], width: int) -> tuple[list[int], list[int]]:
    """Which candidates live on, and which finish, by index and best score first (transformers' steps e and f)."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])  # stable, as candidates come sorted if greedy
    going = [index for index in order if not stopped[index]][:width]
    return going, [index for index in order[:width] if stopped[index]]


def draw_beams(
    scores_L: torch.Tensor,
    log_probs_LV: torch.Tensor,
    noise_LV: torch.Tensor | None,
    keep: int,
    stops: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[Candidates, torch.Tensor]:
    """The first half of the beam step, on the device (design §2; transformers' ``_beam_search``, steps c and d).

    Args:
        scores_L: float32 (L,), accumulated scores of the live beams.
        log_probs_LV: float32 (L, V), their processed log-probabilities.
        noise_LV: float32 (L, V) Gumbel noise to sample, or None to search greedily.
        keep: candidates to consider, `candidates_to_keep`.
        stops: maps (parents (K,), tokens (K,)) to bool (K,): the continuation meets a stopping criterion, EOS included.

    Returns:
        The candidates, those that the processors excluded (-inf) last, and bool (K,): which of them end.
    """
    drawn = top_candidates(scores_L, log_probs_LV, noise_LV, keep)
    return drawn, stops(drawn.parents_K, drawn.tokens_K)


def live_candidates(drawn: Candidates, stopped_K: torch.Tensor, width: int, keep: int) -> torch.Tensor:
    """Which candidates live on, decided on the device: `settle_beams` without the host.

    Args:
        drawn: from `draw_beams`.
        stopped_K: bool (K,), likewise.
        width: beams to keep.
        keep: how many of ``drawn`` are considered.

    Returns:
        int64 (width,) or fewer where there are fewer candidates, indices into ``drawn``, best score first. Where fewer
        than ``width`` can live, the last ones are of no meaning.
    """
    scores = drawn.scores_K.masked_fill(stopped_K, float("-inf"))[:keep]
    return torch.sort(scores, descending=True, stable=True).indices[:width]


def settle_beams(drawn: Candidates, scores: list[float], stopped: list[bool], width: int) -> Selection:
    """The second half of the beam step, on the host (transformers' steps e and f).

    Args:
        drawn: from `draw_beams`.
        scores: their scores, on the host.
        stopped: whether each ends.
        width: beams to keep.

    Returns:
        The selection. Continuations that the processors excluded (-inf) are dropped: they can never be returned.

    Raises:
        NumericalError: a score is NaN.
    """
    if any(score != score for score in scores):
        raise NumericalError(NAN_LOGITS)
    count = sum(score > float("-inf") for score in scores)  # the excluded ones come last
    return make_selection(drawn.first(count), scores[:count], stopped[:count], width)
