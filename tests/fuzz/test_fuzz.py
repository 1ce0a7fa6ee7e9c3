"""A few hundred hostile inputs of each kind, and the named attacks; ``make soak`` reads 10,000."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from beamwise.cli import main
from beamwise.commands.loading import load_draft_model
from beamwise.controller.checkpoint import Controller
from beamwise.decoding.errors import BeamwiseError, FormatError, InputError, ModelError
from beamwise.decoding.models import load_model
from beamwise.decoding.prompts import read_prompts
from beamwise.decoding.safe_files import inside, parse_json
from beamwise.decoding.trace import check_traces
from beamwise.decoding.trace_schema import MANIFEST
from tests.conftest import make_tiny_llama
from tests.tiny_folder import save_tiny_folder

from .judge import fuzz, judge
from .mutate import fresh_copy
from .surfaces import PAYLOADS, SURFACES, Controllers, Drafts, Refused, Traces, run_command

INPUTS = {"prompts": 300, "configs": 200, "traces": 300, "drafts": 200, "controllers": 300}


@pytest.mark.parametrize("name", SURFACES)
def test_hostile_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tally = fuzz(name, 0, INPUTS[name], seed=1, work=tmp_path / "work")
    assert not tally.bad, tally.bad[0]
    assert tally.counts["refused"] > INPUTS[name] // 2  # the inputs are hostile


def test_the_judge_sees_what_is_bad(tmp_path: Path) -> None:
    def raises(error: BaseException) -> Callable[[], object]:
        def read() -> None:
            raise error

        return read

    assert judge(lambda: None, tmp_path)[0] == "accepted"
    assert judge(raises(InputError("no")), tmp_path)[0] == "refused"
    assert judge(raises(KeyError("no")), tmp_path)[0] == "traceback"
    assert judge(lambda: os.system("true"), tmp_path)[0] == "execution"


ESCAPES = ["link out", "device", "pipe", "folder", "loop"]


def escape(path: Path, kind: str) -> None:
    """Put the escape in the file's place; the link leads to a good copy of the file."""
    outside = path.parents[1] / "outside"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link out": outside, "device": Path("/dev/zero"), "loop": path}[kind])


@pytest.mark.parametrize("kind", ESCAPES)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_escapes_from_checkpoint_folders(tmp_path: Path, kind: str, name: str) -> None:
    controller = fresh_copy(Controllers(tmp_path / "c").base, tmp_path / "one" / "controller")
    escape(controller / name, kind)
    with pytest.raises(FormatError):
        Controller.from_pretrained(controller)
    drafts = Drafts(tmp_path / "d")
    draft = fresh_copy(drafts.bases[0], tmp_path / "two" / "draft")
    escape(draft / name, kind)
    with pytest.raises(FormatError):
        load_draft_model(str(draft), drafts.target)


@pytest.mark.parametrize("kind", ESCAPES)
@pytest.mark.parametrize("name", [MANIFEST, "layers/000000.parquet"])
def test_escapes_from_trace_folders(tmp_path: Path, kind: str, name: str) -> None:
    folder = fresh_copy(Traces(tmp_path / "t").base, tmp_path / "one" / "traces")
    outside = folder / name if name == MANIFEST else folder / "layers" / "000000.parquet"
    escape(outside, "link out" if kind == "link out" and name == MANIFEST else kind)
    if name != MANIFEST and kind == "link out":
        (outside).unlink()
        good = Traces(tmp_path / "elsewhere").base / "layers" / "000000.parquet"
        outside.symlink_to(good)  # the very bytes that the manifest names
    with pytest.raises(FormatError):
        check_traces(folder)


@pytest.mark.parametrize("name", ["../000000.parquet", "/etc/passwd", "a/../../x", "000000.parquet\0", ""])
def test_shard_names_stay_inside(tmp_path: Path, name: str) -> None:
    folder = Traces(tmp_path).base
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"][0]["name"] = name
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(FormatError):
        check_traces(folder)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    snapshot = fresh_copy(Controllers(tmp_path / "c").base, cache / "snapshots" / "123")
    (cache / "blobs").mkdir()
    (snapshot / "config.json").rename(cache / "blobs" / "hash")
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    assert Controller.from_pretrained(snapshot).info.models == {"target": "t"}
    with pytest.raises(FileNotFoundError):
        inside(snapshot, "other.json")


def test_pickled_weights_and_foreign_code_are_not_loaded(tmp_path: Path) -> None:
    folder = Path(save_tiny_folder(tmp_path / "model", make_tiny_llama(vocab_size=40)))
    model, _ = load_model(str(folder), device="cpu")
    weights = dict(model.state_dict())
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model(str(folder), device="cpu")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'sentinel')!r}, 'w')\n")
    with pytest.raises(ModelError):
        load_model(str(folder), device="cpu")
    assert not (tmp_path / "sentinel").exists()


def test_deep_and_half_texts_are_no_json() -> None:
    assert parse_json('{"a": [1, "\\ud83d\\ude00"]}') == {"a": [1, "\U0001f600"]}
    for text in ("[" * 100_000, "[" * 70 + "]" * 70, '"\\ud800"', '{"\\ud800": 1}'):
        with pytest.raises(ValueError, match=r"nested|surrogates"):
            parse_json(text)


def test_devices_are_no_prompts_files() -> None:
    with pytest.raises(InputError, match="device"):
        read_prompts("/dev/zero")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PAYLOADS[5], "aliases written out"),
        ("!!python/object/apply:os.system ['true']", "no YAML"),
        ("prompts: &loop [*loop]", "nested deeper"),
        ("trainer: {logger: {class_path: os.system}}", "class_path"),
        ("num-beams: " + "[" * 5000, "no YAML"),
        ("? [1, 2]\n: 3", "no YAML"),
    ],
)
def test_hostile_configs(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises((Refused, BeamwiseError), match=words):
        run_command(["generate", "--config", str(path)])


def test_pipes_are_no_configs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert main(["collect", "--config", str(tmp_path / "pipe.yaml")]) == 2
