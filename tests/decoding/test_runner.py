"""Static shapes, and what is captured of them, against the plain forwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from beamwise.cli import build_parser
from beamwise.decoding import kv_pool
from beamwise.decoding import runner as runner_module
from beamwise.decoding.causal import CausalModel
from beamwise.decoding.compat import check_model
from beamwise.decoding.config import DecodeConfig, RunnerName
from beamwise.decoding.draft_model import build_draft
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.kv_pool import KVPool
from beamwise.decoding.runner import (
    TOKEN_BUCKETS,
    Inputs,
    Runner,
    Shape,
    resolve_runner,
    row_bucket,
    slot_bucket,
    token_bucket,
)
from tests.conftest import make_tiny_llama
from tests.decoding.tape import tape_capture
from tests.decoding.test_kv_pool import VOCAB, RandomForest


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    """``runner="graphs"`` on the CPU: graphs are tapes."""
    monkeypatch.setattr(kv_pool, "CudaGraphs", lambda: tape_capture)
    monkeypatch.setattr(kv_pool, "resolve_runner", lambda name, model: name)


def make_pool(model: LlamaForCausalLM, runner: RunnerName, rows: int = 2, capacity: int = 4) -> KVPool:
    causal = CausalModel(model)
    check_model(causal)
    return KVPool(causal, rows, capacity, runner=runner)


def storage(pool: KVPool) -> list[torch.Tensor]:
    return [tensor for layer in pool._cache.layers for tensor in (cast(Any, layer).keys, cast(Any, layer).values)]


def test_buckets_hold_what_they_pad() -> None:
    for count in range(1, 300):
        size = token_bucket(count)
        assert size >= count
        assert size in TOKEN_BUCKETS or size % 64 == 0
        assert slot_bucket(count) in (256, 512)
        assert slot_bucket(count) >= count
    assert [token_bucket(n) for n in (1, 3, 9, 17, 25, 33, 49, 64, 65, 129)] == [1, 4, 16, 24, 32, 48, 64, 64, 128, 192]
    assert [row_bucket(n, 6) for n in (1, 2, 3, 5)] == [1, 2, 4, 6]


@pytest.mark.parametrize("runner", ["buckets", "graphs"])
def test_static_shapes_give_the_plain_logits(runner: RunnerName, taped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random blocks of two rows that take turns, with growth of the storage on the way."""
    for module in (kv_pool, runner_module):
        monkeypatch.setattr(module, "SLOT_BUCKET", 16)
    model = make_tiny_llama(3, vocab_size=VOCAB)
    pool, plain = make_pool(model, runner), make_pool(model, "eager")
    rows = [RandomForest(seed, width=4) for seed in range(2)]
    with torch.inference_mode():
        for block in range(100):
            active = [0, 1] if block % 3 else [block % 2]
            for index in active:
                rows[index].draft()
            forests = [rows[index].forest for index in active]
            wanted = [min(pool.pending(i, f), f.size) for i, f in zip(active, forests, strict=True)]
            for ours, theirs in zip(
                pool.forward(active, forests, wanted), plain.forward(active, forests, wanted), strict=True
            ):
                torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
            for index in active:
                rows[index].commit()
                pruning: Any = rows[index].prune()
                pool.prune(index, pruning)
                plain.prune(index, pruning)
    assert pool._runner is not None
    assert bool(pool._runner.captured) == (runner == "graphs")
    assert pool.capacity > 16  # the storage grew, and what was captured before was captured anew


def test_padding_is_finite_and_touches_the_scratch_slot_alone() -> None:
    pool = make_pool(make_tiny_llama(1, vocab_size=VOCAB), "buckets", rows=3)
    row = RandomForest(1, width=3)
    with torch.inference_mode():
        pool.forward([1], [row.forest], [1])  # allocates
        for tensor in storage(pool):
            tensor.fill_(0.25)
        row.extend([0, 0, 0])
        assert pool._runner is not None
        hidden = []
        body = pool._runner._body
        pool._runner._body = lambda inputs: hidden.append(body(inputs)) or hidden[-1]
        start = pool.filled[1]
        pool.forward([1], [row.forest], [3])
    assert hidden[0].shape[:2] == (2, 4)  # rows 0 and 1, 3 tokens in a bucket of 4
    assert bool(hidden[0].isfinite().all())
    for tensor in storage(pool):
        changed = (tensor != 0.25).any(dim=3).any(dim=1)
        assert changed[1].nonzero().flatten().tolist() == [*range(start, start + 3), 255]
        assert changed[0].nonzero().flatten().tolist() == [255]
        assert not bool(changed[2].any())


def test_padded_queries_attend_to_the_scratch_slot_alone() -> None:
    inputs = Inputs.make(Shape(2, 4, 256), torch.device("cpu"), None, torch.float64)
    inputs.clear()
    inputs.set_row(1, 5, torch.tensor([7, 8]), torch.tensor([5, 6]), torch.ones(2, 7, dtype=torch.bool))
    assert inputs.slots_BT.tolist() == [[255] * 4, [5, 6, 255, 255]]
    seen = [inputs.visible_BTS[row, query].nonzero().flatten().tolist() for row in range(2) for query in range(4)]
    assert seen == [[255]] * 4 + [list(range(7))] * 2 + [[255]] * 2


def test_nothing_is_allocated_once_the_pool_is_in_use(taped: None) -> None:
    """The storage and what was captured over it outlive a call of generate."""
    target = make_tiny_llama(3, vocab_size=VOCAB)
    beams = SpeculativeBeams(
        draft_model=make_tiny_llama(4, vocab_size=VOCAB), drafter="model", gamma=2, runner="graphs"
    )
    arguments: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 30, "eos_token_id": None, "custom_generate": beams}
    prompt = torch.tensor([[3, 4, 5]])
    first = cast(Any, target).generate(prompt, **arguments)
    engine = beams.engine(target, 3)
    pools = [engine._pool, cast(Any, engine.drafter).pool]
    before = [[tensor.data_ptr() for tensor in storage(pool)] for pool in pools]
    captured = [pool._runner.captured for pool in pools]
    assert all(captured)
    second = cast(Any, target).generate(prompt, **arguments)
    assert first.tolist() == second.tolist()
    assert [engine._pool, cast(Any, engine.drafter).pool] == pools
    assert [[tensor.data_ptr() for tensor in storage(pool)] for pool in pools] == before
    assert [pool._runner.captured[: len(old)] for pool, old in zip(pools, captured, strict=True)] == captured


@pytest.mark.parametrize("runner", ["buckets", "graphs"])
@pytest.mark.parametrize("kind", ["itself", "pruned", "feature"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_whole_searches_are_those_of_the_eager_engine(
    runner: RunnerName, kind: str, do_sample: bool, taped: None
) -> None:
    target = make_tiny_llama(11, vocab_size=VOCAB, layers=3)
    draft = target if kind == "itself" else build_draft(target, kind, [0, 2], torch.arange(1, VOCAB, 2))
    outputs = []
    for name in ("eager", runner):
        beams = SpeculativeBeams(draft_model=draft, gamma=3, draft_width=6, seed=5, batch_size=2, runner=name)
        prompts = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6], [2, 2, 2, 2]])
        outputs.append(
            cast(Any, target).generate(
                prompts,
                num_beams=3,
                num_return_sequences=3,
                max_new_tokens=24,
                do_sample=do_sample,
                return_dict_in_generate=True,
                custom_generate=beams,
            )
        )
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    torch.testing.assert_close(outputs[0].sequences_scores, outputs[1].sequences_scores, atol=1e-6, rtol=1e-6)


def test_long_prompts_run_as_they_are() -> None:
    """Beyond the largest static shape, and chunk by chunk."""
    target = make_tiny_llama(2, vocab_size=VOCAB)
    target.config.max_position_embeddings = 4096
    prompt = torch.randint(VOCAB, (1, 700), generator=torch.Generator().manual_seed(0))
    outputs = [
        cast(Any, target).generate(
            prompt, num_beams=2, max_new_tokens=6, custom_generate=SpeculativeBeams(gamma=2, runner=runner)
        )
        for runner in ("eager", "buckets")
    ]
    assert outputs[0].tolist() == outputs[1].tolist()


def test_the_first_forward_of_a_shape_is_plain() -> None:
    calls = []
    runner = Runner(
        lambda inputs: calls.append("plain") or torch.zeros(1),
        torch.device("cpu"),
        lambda run: calls.append("captured") or (lambda: calls.append("replayed") or torch.zeros(1)),
    )
    for _ in range(3):
        runner.run(runner.inputs(Shape(1, 2, 256)))
    runner.run(runner.inputs(Shape(1, 4, 256)))
    assert calls == ["plain", "captured", "replayed", "replayed", "plain"]


def test_compiled_code_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and guarded as by ``torch.compile``; without its code generator, which takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target = make_tiny_llama(6, vocab_size=VOCAB, layers=1)
    outputs = [
        cast(Any, target).generate(
            torch.tensor([[3, 4, 5]]),
            num_beams=2,
            max_new_tokens=6,
            custom_generate=SpeculativeBeams(drafter="none", runner=runner),
        )
        for runner in ("eager", "compile")
    ]
    assert outputs[0].tolist() == outputs[1].tolist()


def test_which_runner_a_model_gets() -> None:
    def on_cuda(rope: Any) -> PreTrainedModel:
        config = SimpleNamespace(rope_parameters=rope)
        config.get_text_config = lambda: config
        device = torch.device("cuda")
        return cast(
            PreTrainedModel,
            SimpleNamespace(device=device, config=config, parameters=lambda: [SimpleNamespace(device=device)]),
        )

    model = make_tiny_llama(0)
    assert resolve_runner("auto", model) == "eager"
    assert resolve_runner("buckets", model) == "buckets"
    with pytest.raises(ConfigError, match="CUDA graphs need the model on a CUDA device"):
        resolve_runner("graphs", model)
    assert resolve_runner("auto", on_cuda({"rope_type": "default"})) == "graphs"
    assert resolve_runner("auto", on_cuda({"rope_type": "dynamic"})) == "eager"
    with pytest.raises(ConfigError, match="longrope"):
        resolve_runner("graphs", on_cuda({"full_attention": {"rope_type": "longrope"}}))
    with pytest.raises(ConfigError, match="runner is 'fast'"):
        DecodeConfig(runner="fast")  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: CUDA graphs cannot be captured")
@pytest.mark.parametrize("do_sample", [False, True])
def test_cuda_graphs_give_the_eager_output(do_sample: bool) -> None:
    target = make_tiny_llama(11, vocab_size=VOCAB, layers=3).to("cuda")
    draft = build_draft(target, "pruned", [0, 2], torch.arange(1, VOCAB, 2, device="cuda"))
    outputs = []
    for name in ("eager", "graphs"):
        beams = SpeculativeBeams(draft_model=draft, gamma=3, draft_width=6, seed=5, batch_size=2, runner=name)
        prompts = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6], [2, 2, 2, 2]], device="cuda")
        outputs.append(
            target.generate(prompts, num_beams=3, max_new_tokens=24, do_sample=do_sample, custom_generate=beams)
        )
    assert outputs[0].tolist() == outputs[1].tolist()


def test_the_profile_preset_for_gpus_is_valid(tmp_path: Path) -> None:
    preset = Path(__file__).parents[2] / "configs" / "profile_gpu.yaml"
    parser = build_parser("profile")
    config = parser.parse_args(["profile", "--config", str(preset), "--out", str(tmp_path / "profile.json")])
    values = parser.instantiate(config)["profile"]
    assert values["runner"] == "graphs"
    assert all(token_bucket(count) == count for count in values["tokens"])
