"""Bad input: one typed error that names the input and the mend, before anything is decoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessorList

from beamwise.decoding.drafter_choice import make_drafter
from beamwise.decoding.drafters import LookupDrafter, ModelDrafter, UnionDrafter
from beamwise.decoding.errors import ConfigError, InputError, ModelError, NumericalError, UnsupportedError
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.models import load_model, resolve_device, resolve_dtype
from beamwise.decoding.widths import FixedWidth, RandomWidth
from tests.conftest import make_tiny_llama

PROMPT = torch.tensor([[3, 4, 5]])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_tiny_llama(0)


def run(model: LlamaForCausalLM, ids: torch.Tensor = PROMPT, beams: SpeculativeBeams | None = None, **more: Any) -> Any:
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 4, **more}
    return model.generate(ids, **options, custom_generate=beams or SpeculativeBeams())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
    ],
)
def test_unsupported_features_are_named(model: LlamaForCausalLM, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        run(model, **more)


def test_more_sequences_than_beams(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="num_return_sequences"):  # transformers may be the first to notice
        run(model, num_return_sequences=3)


def test_too_many_beams_for_the_vocabulary(model: LlamaForCausalLM) -> None:
    with pytest.raises(InputError, match=r"num_beams=17 needs 34 candidates.*fewer beams"):
        run(model, num_beams=17)


def test_a_prompt_beyond_the_models_positions(model: LlamaForCausalLM) -> None:
    with pytest.raises(InputError, match=r"512 positions.*at most 2 new tokens"):
        run(model, torch.full((1, 510), 3), max_new_tokens=3)


def test_an_empty_prompt(model: LlamaForCausalLM) -> None:
    with pytest.raises(InputError, match="empty"):
        run(model, torch.tensor([[1, 1, 1]]), attention_mask=torch.zeros(1, 3, dtype=torch.int64))


def test_padding_on_the_right(model: LlamaForCausalLM) -> None:
    with pytest.raises(InputError, match="pad on the left"):
        run(model, attention_mask=torch.tensor([[1, 1, 0]]))


def test_nan_logits() -> None:
    broken = make_tiny_llama(0)
    healthy = make_tiny_llama(0)
    beams = SpeculativeBeams()
    run(broken, beams=beams)  # the model's check has passed
    with torch.no_grad():
        broken.lm_head.weight[5] = float("nan")
    with pytest.raises(NumericalError, match="NaN logits"):
        run(broken, beams=beams)
    with pytest.raises(NumericalError, match="NaN"):
        run(broken)
    # a broken draft costs speed alone
    ours = run(healthy, beams=SpeculativeBeams(draft_model=None, drafter="none"))
    draft = ModelDrafter(make_tiny_llama(3), healthy)
    with torch.no_grad():
        draft.model.model.lm_head.weight.fill_(float("nan"))
    assert torch.equal(run(healthy, beams=SpeculativeBeams(drafter=draft)), ours)


def test_mismatched_vocabularies(model: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match=r"40 tokens and the target 32.*distil"):
        run(model, beams=SpeculativeBeams(draft_model=make_tiny_llama(0, vocab_size=40), drafter="model"))


def test_drafters_and_policies_check_their_settings(model: LlamaForCausalLM) -> None:
    for build, message in (
        (lambda: SpeculativeBeams(gamma=-1), "gamma"),
        (lambda: SpeculativeBeams(draft_width=0), "draft_width"),
        (lambda: SpeculativeBeams(batch_size=0), "batch_size"),
        (lambda: FixedWidth(1, 1, width=0), "width"),
        (lambda: RandomWidth(0, (1,)), "gamma"),
        (lambda: RandomWidth(1, ()), "draft_widths"),
        (lambda: LookupDrafter(max_ngram=1, min_ngram=2), "min_ngram"),
        (lambda: UnionDrafter(ModelDrafter(model, model), LookupDrafter(), weight=1.0), "weight"),
        (lambda: make_drafter("model", None, model), "draft_model"),
        (lambda: make_drafter("magic", None, model), "Unknown drafter"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=message):
            build()


def test_models_that_cannot_be_loaded(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        load_model(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="Cannot load"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="Unknown dtype"):
        resolve_dtype("float8")
    with pytest.raises(ModelError, match="Unknown device"):
        resolve_device("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="no CUDA"):
            resolve_device("cuda")


def test_processors_that_leave_fewer_tokens_than_beams(model: LlamaForCausalLM) -> None:
    """Like transformers: the search goes on with the beams that are left."""

    class OnlyTwo:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill(
                (torch.arange(scores.shape[1]) > 4) | (torch.arange(scores.shape[1]) < 3), -torch.inf
            )

    more: dict[str, Any] = {"num_beams": 4, "logits_processor": LogitsProcessorList([OnlyTwo()]), "eos_token_id": None}
    assert torch.equal(run(model, **more), model.generate(PROMPT, max_new_tokens=4, **more))
