"""The lookup drafter, against the plain definition of what it counts."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beamwise.decoding.drafters import LookupDrafter, Proposal


def votes(sequence: list[int], max_ngram: int, min_ngram: int) -> list[int]:
    """The tokens that followed the earlier occurrences of the longest suffix that has any."""
    for size in range(min(max_ngram, len(sequence) - 1), min_ngram - 1, -1):
        suffix = sequence[-size:]
        found = [sequence[at + size] for at in range(len(sequence) - size) if sequence[at : at + size] == suffix]
        if found:
            return found
    return []


def look_up(drafter: LookupDrafter, sequences: torch.Tensor) -> Proposal:
    return drafter.propose([0], [], [sequences])[0]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), length=st.integers(1, 24), beams=st.integers(1, 4), vocab=st.integers(1, 5))
def test_every_earlier_occurrence_votes(data: st.DataObject, length: int, beams: int, vocab: int) -> None:
    token = st.integers(0, vocab - 1)
    sequences = [data.draw(st.lists(token, min_size=length, max_size=length)) for _ in range(beams)]
    least = data.draw(st.integers(1, 3))
    drafter = LookupDrafter(max_ngram=data.draw(st.integers(least, 5)), min_ngram=least)
    expected = [votes(sequence, drafter.max_ngram, least) for sequence in sequences]
    proposal = look_up(drafter, torch.tensor(sequences))
    assert proposal.token_ids_V is not None
    assert proposal.token_ids_V.tolist() == sorted({vote for row in expected for vote in row})
    counts = [[row.count(token) for token in proposal.token_ids_V.tolist()] for row in expected]
    assert proposal.logits_PV.exp().round().int().tolist() == counts


def test_nothing_matches() -> None:
    proposal = look_up(LookupDrafter(), torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert proposal.logits_PV.shape == (2, 0)
