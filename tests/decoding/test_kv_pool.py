"""The pool against recomputation from scratch, after hundreds of random blocks."""

from __future__ import annotations

import random

import pytest
import torch

from beamwise.decoding.causal import CausalModel
from beamwise.decoding.draft_model import build_draft
from beamwise.decoding.feature_drafter import FeatureDrafter
from beamwise.decoding.forest import Forest
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.kv_pool import KVPool
from tests.conftest import make_tiny_llama

VOCAB = 32


class RandomForest:
    """A forest that grows and is pruned at random, next to the plain token sequences of its live nodes."""

    def __init__(self, seed: int, width: int) -> None:
        self.rng = random.Random(seed)
        self.width = width
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 9))]
        self.forest = Forest(torch.tensor(prompt[:-1], dtype=torch.int64), torch.device("cpu"), capacity=2)
        root = int(self.forest.add_root(torch.tensor(prompt[-1:])))
        self.sequences = {root: prompt}
        self.live = [root]

    def extend(self, parents: list[int]) -> list[int]:
        tokens = [self.rng.randrange(VOCAB) for _ in parents]
        nodes = self.forest.add(torch.tensor(parents), torch.tensor(tokens)).tolist()
        for node, parent, token in zip(nodes, parents, tokens, strict=True):
            self.sequences[node] = [*self.sequences[parent], token]
        return nodes

    def draft(self) -> None:
        """One to three layers of random children."""
        layer = self.live
        for _ in range(self.rng.randrange(0, 4)):
            layer = self.extend([self.rng.choice(layer) for _ in range(self.rng.randrange(1, 6))])

    def commit(self) -> None:
        """New leaves on random nodes become the live beams, as after a verification."""
        parents = [self.rng.choice(list(self.sequences)) for _ in range(self.rng.randrange(1, self.width + 1))]
        self.live = self.extend(parents)

    def prune(self) -> object:
        pruning = self.forest.prune(torch.tensor(self.live))
        stay = pruning.kept[pruning.joined :]
        self.sequences = {new: self.sequences[old] for new, old in enumerate(stay)}
        self.live = list(range(len(stay) - len(self.live), len(stay)))
        return pruning


def test_logits_equal_plain_forwards_after_hundreds_of_blocks() -> None:
    model = make_tiny_llama(3, vocab_size=VOCAB, layers=2)
    causal = CausalModel(model)
    pool = KVPool(causal, rows=2, capacity=4)
    rows = [RandomForest(seed, width=4) for seed in range(2)]
    checked = 0
    with torch.no_grad():
        for block in range(200):
            active = [0, 1] if block % 3 else [block % 2]
            for index in active:
                rows[index].draft()
            pending = [pool.pending(index, rows[index].forest) for index in active]
            wanted = [min(count, rows[i].forest.size) for count, i in zip(pending, active, strict=True)]
            logits = pool.forward(active, [rows[i].forest for i in active], wanted)
            for index, row_logits in zip(active, logits, strict=True):
                row = rows[index]
                first = row.forest.size - row_logits.shape[0]
                node = row.rng.randrange(first, row.forest.size)
                plain = model(torch.tensor([row.sequences[node]]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(row_logits[node - first], plain, atol=1e-9, rtol=1e-9)
                checked += 1
                row.commit()
                pool.prune(index, row.prune())  # type: ignore[arg-type]
                if len(row.sequences[row.live[0]]) > 150:  # start over, in the same row of the pool
                    rows[index] = RandomForest(1000 + block, width=4)
                    pool.clear(index)
    assert checked > 300


def test_a_long_prompt_is_computed_in_chunks() -> None:
    model = make_tiny_llama(1, vocab_size=VOCAB)
    model.config.max_position_embeddings = 4096
    prompt = torch.randint(VOCAB, (1300,), generator=torch.Generator().manual_seed(0))
    forest = Forest(prompt[:-1], torch.device("cpu"))
    forest.add_root(prompt[-1:])
    pool = KVPool(CausalModel(model), rows=1, capacity=8)
    with torch.no_grad():
        logits = pool.forward([0], [forest], [1])[0][0]
        torch.testing.assert_close(logits, model(prompt[None]).logits[0, -1], atol=1e-9, rtol=1e-9)


def test_a_lagging_pool_catches_up() -> None:
    """A draft's pool that was not used for many blocks, while the trunk grew."""
    model = make_tiny_llama(5, vocab_size=VOCAB)
    pool = KVPool(CausalModel(model), rows=1, capacity=8)
    row = RandomForest(5, width=3)
    with torch.no_grad():
        for block in range(60):
            row.draft()
            if block % 10 == 9:
                node = row.forest.size - 1
                plain = model(torch.tensor([row.sequences[node]]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(pool.forward([0], [row.forest], [1])[0][0], plain, atol=1e-9, rtol=1e-9)
            row.commit()
            pool.prune(0, row.prune())  # type: ignore[arg-type]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_feature_drafts_see_the_targets_states_wherever_it_has_been(num_beams: int) -> None:
    """At a block's start the draft's logits are those of a plain forward on the target's true states."""
    target = make_tiny_llama(7, vocab_size=VOCAB, layers=3)
    draft = build_draft(target, "feature", [0, 2], None)
    with torch.no_grad():
        draft.fusion.weight.add_(
            torch.randn(draft.fusion.weight.shape, generator=torch.Generator().manual_seed(1)) * 0.3
        )
    checked = []

    class Checking(FeatureDrafter):
        def propose(self, rows, forests, sequences):  # type: ignore[no-untyped-def]
            first_layer = self._block_start[rows[0]] is None
            proposals = super().propose(rows, forests, sequences)
            if first_layer:
                for sequence, logits in zip(sequences[0], proposals[0].logits_PV, strict=True):
                    states = target.base_model(sequence[None]).last_hidden_state
                    before = torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
                    fused = draft.fusion(torch.cat([draft.get_input_embeddings()(sequence[None]), before], dim=-1))
                    plain = draft.get_output_embeddings()(draft.base_model(inputs_embeds=fused).last_hidden_state)
                    torch.testing.assert_close(logits, plain[0, -1].float(), atol=1e-5, rtol=1e-5)
                    checked.append(1)
            return proposals

    custom = SpeculativeBeams(drafter=Checking(draft, target), gamma=3, draft_width=5)
    prompt = torch.tensor([[3, 4, 5, 6]])
    target.generate(prompt, num_beams=num_beams, max_new_tokens=40, eos_token_id=None, custom_generate=custom)
    assert len(checked) >= 20
    if num_beams == 1:  # some drafted nodes were accepted, so that states were replaced and computed again
        assert custom.stats.mean_acceptance_length > 1.0
