"""Distilling a tiny target: it learns, resumes exactly, and its draft loads beside its target alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from beamwise.decoding.draft_model import build_draft, is_draft_folder, load_draft, own_state
from beamwise.decoding.errors import ConfigError, FormatError, InputError, ModelError
from beamwise.decoding.generate import SpeculativeBeams
from beamwise.decoding.models import load_model
from beamwise.train.distill import DistilConfig, distil
from beamwise.train.distill_data import RESPONSE_SETTINGS, Record, frequent_tokens
from beamwise.train.distill_module import StepLoader, acceptance
from tests.conftest import make_tiny_llama
from tests.tiny_folder import CHAT_TEMPLATE, WORDS, save_tiny_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> DistilConfig:
    """A tiny target on disk, prompts, and settings of a short run."""
    folder = tmp_path_factory.mktemp("distil")
    model = make_tiny_llama(0, vocab_size=40, layers=4, scale=0.3, dtype=torch.float32)
    target = save_tiny_folder(folder / "target", model, CHAT_TEMPLATE)
    for name, count, offset in (("train", 24, 0), ("held_out", 4, 5)):
        rows = [
            {"id": f"{name}-{n}", "category": "words", "prompt": f"{WORDS[(n + offset) % 13]} {WORDS[n % 7]}"}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return DistilConfig(
        prompts=[str(folder / "train.jsonl")],
        validation_prompts=[str(folder / "held_out.jsonl")],
        out=str(folder / "draft"),
        work_dir=str(folder / "work"),
        target=target,
        kind="feature",
        layers=[0, 3],
        vocabulary=24,
        max_new_tokens=16,
        max_steps=24,
        batch_size=4,
        warmup_steps=4,
        precision="32-true",
        validate_every=12,
        device="cpu",
        wandb=False,
    )


@pytest.fixture(scope="module")
def draft_folder(base: DistilConfig) -> Path:
    return distil(base)


@pytest.mark.parametrize("kind", ["feature", "pruned"])
def test_training_raises_acceptance(base: DistilConfig, tmp_path: Path, kind: str) -> None:
    settings = {"kind": kind, "learning_rate": 3e-3, "validate_every": 60}
    for steps in (1, 60):
        distil(
            replace(
                base, out=str(tmp_path / f"{steps}"), work_dir=str(tmp_path / f"w{steps}"), max_steps=steps, **settings
            )
        )
    metrics = [json.loads((tmp_path / f"w{steps}" / "metrics.json").read_text()) for steps in (1, 60)]
    assert metrics[1]["val/words/acceptance"] > metrics[0]["val/words/acceptance"] + 0.02


def test_a_run_that_was_cut_off_ends_with_the_same_weights(
    base: DistilConfig, draft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_file(draft_folder / "model.safetensors")
    cut = replace(base, out=str(tmp_path / "draft"), work_dir=str(tmp_path / "work"))
    fetch = StepLoader.batch

    def dies(self: StepLoader, step: int) -> dict[str, torch.Tensor]:
        if step == 17:
            raise KeyError("killed")
        return fetch(self, step)

    monkeypatch.setattr(StepLoader, "batch", dies)
    with pytest.raises(KeyError, match="killed"):
        distil(cut)
    assert not (tmp_path / "draft").exists()
    monkeypatch.setattr(StepLoader, "batch", fetch)
    resumed = load_file(distil(cut) / "model.safetensors")
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_responses_are_cached(base: DistilConfig, draft_folder: Path) -> None:
    lines = (Path(base.work_dir) / "responses.jsonl").read_text().splitlines()
    assert len(lines) == 24
    assert len({json.loads(line)["id"] for line in lines}) == 24
    assert len(RESPONSE_SETTINGS) >= 3


def test_the_draft_decodes_without_changing_the_output(base: DistilConfig, draft_folder: Path) -> None:
    target, tokenizer = load_model(base.target, device="cpu")
    draft = load_draft(draft_folder, target)
    inputs = tokenizer("the cat sees moon", return_tensors="pt")
    for do_sample in (False, True):
        options = {"num_beams": 3, "max_new_tokens": 20, "do_sample": do_sample, "eos_token_id": None}
        plain = target.generate(**inputs, **options, custom_generate=SpeculativeBeams(drafter="none", seed=1))
        for drafter in ("model", "union"):
            beams = SpeculativeBeams(draft_model=draft, drafter=drafter, seed=1, gamma=2)
            assert torch.equal(target.generate(**inputs, **options, custom_generate=beams), plain)


def test_the_checkpoint_holds_its_own_weights_alone(base: DistilConfig, draft_folder: Path) -> None:
    tensors = load_file(draft_folder / "model.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert {tensor.dtype for name, tensor in tensors.items() if name != "draft_token_ids"} == {torch.bfloat16}
    assert tensors["draft_token_ids"].shape == (24,)
    config = json.loads((draft_folder / "config.json").read_text())
    assert config["layers"] == [0, 3]
    assert config["training"]["steps"] == 24
    assert config["training"]["train_response_tokens"] > 0
    assert 0.0 < config["metrics"]["val/words/acceptance"] <= 1.0


def test_another_target_is_refused(base: DistilConfig, draft_folder: Path) -> None:
    other = make_tiny_llama(1, vocab_size=40, layers=4, scale=0.3)
    with pytest.raises(ModelError, match="other weights"):
        load_draft(draft_folder, other)
    with pytest.raises(ModelError, match="shape"):
        load_draft(draft_folder, make_tiny_llama(0, vocab_size=48, layers=4))
    target, _ = load_model(base.target, dtype="bfloat16", device="cpu")
    assert load_draft(draft_folder, target).dtype == torch.bfloat16  # the same target in another dtype is the same


def test_damaged_folders_are_refused(base: DistilConfig, draft_folder: Path, tmp_path: Path) -> None:
    target, _ = load_model(base.target, device="cpu")
    config = json.loads((draft_folder / "config.json").read_text())
    tensors = load_file(draft_folder / "model.safetensors")

    def folder(**changes: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    assert is_draft_folder(folder())
    load_draft(folder(), target)
    for changes, message in (
        ({"format": "other"}, "not a Beamwise draft"),
        ({"version": 99}, "version 99"),
        ({"surprise": 1}, "wrong fields"),
        ({"layers": [0]}, "does not hold"),
    ):
        with pytest.raises(FormatError, match=message):
            load_draft(folder(**changes), target)
    weights = folder() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(FormatError, match="cannot be read"):
        load_draft(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="cannot be read"):
        load_draft(tmp_path, target)
    assert not is_draft_folder(tmp_path)


def test_bad_settings_are_named(base: DistilConfig) -> None:
    with pytest.raises(ConfigError, match="max_steps"):
        replace(base, max_steps=0)
    with pytest.raises(ConfigError, match="prompts"):
        replace(base, prompts=[])
    with pytest.raises(InputError, match="cannot be read"):
        distil(replace(base, prompts=["nowhere.jsonl"]))
    with pytest.raises(InputError, match="response"):
        distil(replace(base, on_policy=False))
    target, _ = load_model(base.target, device="cpu")
    for layers in ([], [3, 0], [0, 4], [-1]):
        with pytest.raises(ConfigError, match="layers"):
            build_draft(target, "pruned", layers, None)
    with pytest.raises(ConfigError, match="kind"):
        build_draft(target, "other", [0], None)


def test_the_draft_starts_as_the_pruned_target() -> None:
    """Both kinds begin with the target's kept layers: the same logits, whatever states the feature draft reads."""
    target = make_tiny_llama(2, vocab_size=40, layers=4)
    ids = torch.tensor([[3, 4, 5, 6]])
    pruned, feature = (build_draft(target, kind, [0, 3], torch.arange(0, 40, 2)) for kind in ("pruned", "feature"))
    embedded = feature.get_input_embeddings()(ids)
    fused = feature.fusion(torch.cat([embedded, torch.randn_like(embedded)], dim=-1))
    plain = pruned(input_ids=ids).logits
    torch.testing.assert_close(feature(inputs_embeds=fused).logits, plain)
    assert plain.shape == (1, 4, 20)
    whole = build_draft(target, "pruned", [0, 1, 2, 3], None)
    torch.testing.assert_close(whole(input_ids=ids).logits, target(input_ids=ids).logits)
    assert whole.get_input_embeddings() is target.get_input_embeddings()
    assert not any("embed" in name for name in own_state(whole))


def test_acceptance_is_the_overlap() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]]).log()
    columns = torch.tensor([0, 2])
    q = torch.tensor([[0.5, 0.5]]).log()
    outcome = acceptance(p, q, columns)
    assert float(outcome["acceptance"]) == pytest.approx(0.5 + 0.2)
    assert float(outcome["top1"]) == 1.0
    perfect = acceptance(p, p, torch.arange(3))
    assert float(perfect["acceptance"]) == pytest.approx(1.0)
    assert float(perfect["acceptance_t07_k50"]) == pytest.approx(1.0)


def test_the_vocabulary_is_the_most_frequent() -> None:
    records = [Record("a", "c", [1], [5, 5, 7, 7, 7, 2]), Record("b", "c", [1], [7, 5])]
    assert frequent_tokens(records, 2, 10).tolist() == [5, 7]
    assert frequent_tokens(records, 4, 10).tolist() == [0, 2, 5, 7]


def test_the_shipped_configuration_is_valid() -> None:
    raw = yaml.safe_load((Path(__file__).parent.parent.parent / "configs" / "distil.yaml").read_text())
    assert DistilConfig(**raw).kind == "feature"
