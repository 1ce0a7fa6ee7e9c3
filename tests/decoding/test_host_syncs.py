"""How often the host waits for the device, counted on the CPU; and that looking ahead changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from beamwise.controller.latency import LatencyProfile
from beamwise.controller.policy import LearnedWidth
from beamwise.controller.predictor import PredictorConfig, WidthPredictor
from beamwise.decoding import drafting
from beamwise.decoding.draft_model import build_draft
from beamwise.decoding.drafter_choice import DrafterName
from beamwise.decoding.engine import Engine
from beamwise.decoding.forest import Forest
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.host import read, upload
from tests.conftest import make_tiny_llama
from tests.decoding.test_kv_pool import VOCAB, RandomForest
from tests.decoding.test_runner import taped  # noqa: F401  (a fixture)

_READS = {
    torch.ops.aten._local_scalar_dense.default,  # item(), bool(), int(), float(), branching on a tensor
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
}


class Reads(TorchDispatchMode):
    """Counts what would make the host wait if the tensors were on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        for name in ("tolist", "cpu", "numpy"):  # on the CPU these dispatch nothing
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)), raising=False)
        make = torch.tensor

        def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.count += kwargs.get("device") is not None  # a blocking copy to the device
            return make(*args, **kwargs)

        monkeypatch.setattr(torch, "tensor", tensor)

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return method(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.count += by_mask or func in _READS
        return func(*args, **(kwargs or {}))


@pytest.fixture
def looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a read costs a wait."""
    for module in ("verify", "drafting", "noise"):
        monkeypatch.setattr(f"beamwise.decoding.{module}.reads_are_free", lambda device: False)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(reads, layers drafted) of every block that the engine decodes."""
    seen: list[tuple[int, int]] = []
    step, draft = Engine.step, Engine._draft
    depth = [0]

    def counted_draft(self: Engine, rows: Any) -> Any:
        layers = draft(self, rows)
        depth[0] = max(map(len, layers))
        return layers

    def counted_step(self: Engine, rows: Any) -> None:
        with pytest.MonkeyPatch.context() as patch, Reads(patch) as reads:
            step(self, rows)
        seen.append((reads.count, depth[0]))

    monkeypatch.setattr(Engine, "_draft", counted_draft)
    monkeypatch.setattr(Engine, "step", counted_step)
    return seen


def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(4)
    with pytest.MonkeyPatch.context() as patch, Reads(patch) as reads:
        counts = []
        for wait in (
            lambda: values[0].item(),
            lambda: bool(values[1] > 0),
            lambda: values.tolist(),
            lambda: values.nonzero(),
            lambda: values[values > 1],
            lambda: torch.tensor([1], device=values.device),
            lambda: read([values, values > 1]),
        ):
            before = reads.count
            cast(Any, wait)()
            counts.append(reads.count - before)
        before = reads.count
        _ = values[upload([1, 2], values.device)] + values.sum()
    assert counts == [1] * 7
    assert reads.count == before


@pytest.mark.parametrize(("runner", "batch_size"), [("eager", 3), ("graphs", 1)])
@pytest.mark.parametrize(("num_beams", "do_sample"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize(("drafter", "kind"), [("model", "pruned"), ("model", "feature"), ("none", "")])
def test_one_wait_per_block_and_one_per_drafted_layer(
    drafter: DrafterName,
    kind: str,
    num_beams: int,
    do_sample: bool,
    batch_size: int,
    runner: Any,
    steps: list[tuple[int, int]],
    looking_ahead: None,
    taped: None,  # noqa: F811
) -> None:
    target = make_tiny_llama(11, vocab_size=VOCAB, layers=3)
    draft = build_draft(target, kind, [0, 2], torch.arange(1, VOCAB, 2)) if kind else None
    beams = SpeculativeBeams(
        draft_model=draft, drafter=drafter, gamma=3, draft_width=6, seed=5, batch_size=batch_size, runner=runner
    )
    prompts = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6], [2, 2, 2, 2]])
    cast(Any, target).generate(
        prompts, num_beams=num_beams, max_new_tokens=16, do_sample=do_sample, custom_generate=beams
    )
    assert len(steps) >= 5
    assert all(reads <= 1 + layers for reads, layers in steps), steps


@pytest.mark.parametrize("mode", ["exact", "dynamic"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_controller_decides_in_the_same_waits(
    mode: Any,
    batch_size: int,
    steps: list[tuple[int, int]],
    looking_ahead: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One per block and one for each layer that it decides about, the one where it stops included."""
    torch.manual_seed(3)
    decisions: list[int] = []
    decide = drafting._decide

    def counted(questions: Any, drawn: Any) -> Any:
        decisions.append(len(questions))
        return decide(questions, drawn)

    monkeypatch.setattr(drafting, "_decide", counted)
    predictor = WidthPredictor(PredictorConfig(max_width=4, edges=(2, 4, 8), hidden=4))
    profile = LatencyProfile((1, 32), (20.0, 22.0), (0.5, 0.6))
    target = make_tiny_llama(11, vocab_size=VOCAB, layers=3)
    beams = SpeculativeBeams(
        draft_model=build_draft(target, "pruned", [0, 2], torch.arange(1, VOCAB, 2)),
        drafter="model",
        policy=LearnedWidth(predictor, profile, mode, max_gamma=3),
        width_mode=mode,
        batch_size=batch_size,
    )
    prompts = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6], [2, 2, 2, 2]])
    cast(Any, target).generate(prompts, num_beams=4, max_new_tokens=16, custom_generate=beams)
    assert sum(layers for _, layers in steps) >= 5
    assert all(reads <= 2 + layers for reads, layers in steps), steps
    assert sum(reads for reads, _ in steps) <= len(steps) + sum(asked > 0 for asked in decisions)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("kind", ["itself", "pruned", "feature"])
def test_looking_ahead_changes_nothing(
    kind: str, num_beams: int, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_tiny_llama(11, vocab_size=VOCAB, layers=3)
    draft = target if kind == "itself" else build_draft(target, kind, [0, 2], torch.arange(1, VOCAB, 2))
    outcomes = []
    for free in (True, False):
        monkeypatch.setattr("beamwise.decoding.verify.reads_are_free", lambda device, free=free: free)
        blocks: list[Any] = []
        beams = SpeculativeBeams(
            draft_model=draft,
            gamma=3,
            draft_width=6,
            seed=5,
            batch_size=2,
            observer=lambda block, blocks=blocks: blocks.append(  # type: ignore[misc]
                (
                    block.row.request.stream,
                    [layer.drawn_nodes for layer in block.verification.layers],
                    block.verification.log_probs_LV.tolist(),
                    block.row.forest.num_slots,
                )
            ),
        )
        prompts = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6], [2, 2, 2, 2]])
        output = cast(Any, target).generate(
            prompts,
            num_beams=num_beams,
            max_new_tokens=20,
            do_sample=do_sample,
            eos_token_id=[1, 7, 9],
            pad_token_id=0,
            custom_generate=beams,
        )
        outcomes.append((output.tolist(), blocks))
    assert outcomes[0] == outcomes[1]


def test_rules_with_a_state_never_see_beams_that_come_to_nothing(looking_ahead: None) -> None:
    """A processor of the user's own may count its calls: it is called for verified layers alone."""
    target = make_tiny_llama(11, vocab_size=VOCAB, layers=3)
    lengths: list[int] = []

    class Counting(torch.nn.Module):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            lengths.append(input_ids.shape[1])
            return scores

        def __deepcopy__(self, memo: Any) -> Any:  # the draft's copy
            return _Silent()

    beams = SpeculativeBeams(draft_model=make_tiny_llama(12, vocab_size=VOCAB), drafter="model", gamma=3)
    cast(Any, target).generate(
        torch.tensor([[3, 4]]),
        num_beams=2,
        max_new_tokens=12,
        eos_token_id=None,
        logits_processor=[Counting()],
        custom_generate=beams,
    )
    assert lengths == list(range(2, 14))


class _Silent:
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_pruning_by_what_the_host_knows() -> None:
    """The same as by reading the forest."""
    rows = [RandomForest(seed, width=3) for seed in (4, 4)]
    for _ in range(60):
        for row in rows:
            row.draft()
            row.commit()
        forest: Forest = rows[1].forest
        known = forest.parents[: forest.size].tolist(), list(rows[1].live)
        ours = forest.prune(torch.tensor(rows[1].live), known)
        theirs: Any = rows[0].prune()
        assert ours == theirs
        assert forest.tokens[: forest.size].tolist() == rows[0].forest.tokens[: forest.size].tolist()
        rows[1].sequences, rows[1].live = dict(rows[0].sequences), list(rows[0].live)
