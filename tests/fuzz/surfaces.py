"""The five surfaces: how hostile input is made, and what reads it. Reading works or raises a `BeamwiseError`."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from beamwise.cli import main
from beamwise.commands.loading import load_draft_model
from beamwise.controller import checkpoint
from beamwise.controller.checkpoint import Controller
from beamwise.controller.info import ControllerInfo
from beamwise.controller.latency import LatencyProfile
from beamwise.controller.predictor import PredictorConfig, WidthPredictor
from beamwise.decoding.draft_model import DraftCheckpoint, build_draft, save_draft
from beamwise.decoding.features import CONTEXT_NAMES, FEATURE_NAMES
from beamwise.decoding.models import load_model
from beamwise.decoding.prompts import encode_prompt, read_prompts
from beamwise.decoding.trace import TraceWriter, check_traces
from beamwise.decoding.trace_schema import MANIFEST, BlockRow, LayerRow
from tests.conftest import make_tiny_llama
from tests.tiny_folder import CHAT_TEMPLATE, save_tiny_folder

from .mutate import STRANGE, dumps, fresh_copy, mutate_bytes, mutate_file, mutate_json

CONFIGS = Path(__file__).parents[2] / "configs"
PAYLOADS = (
    "!!python/object/apply:os.system ['touch {sentinel}']\n",
    "prompt: !!python/object/apply:subprocess.check_output [[touch, '{sentinel}']]\n",
    "target: {{class_path: os.system, init_args: {{command: 'touch {sentinel}'}}}}\n",
    "trainer: {{logger: {{class_path: os.system, init_args: {{command: 'touch {sentinel}'}}}}}}\n",
    "trainer: {{callbacks: [{{class_path: subprocess.Popen, init_args: {{args: [touch, '{sentinel}']}}}}]}}\n",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
    "c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]\n"
    "e: &e [*d, *d, *d, *d, *d, *d, *d, *d, *d]\nf: &f [*e, *e, *e, *e, *e, *e, *e, *e, *e]\n"
    "g: &g [*f, *f, *f, *f, *f, *f, *f, *f, *f]\nprompts: &h [*g, *g, *g, *g, *g, *g, *g, *g, *g]\n",
    "prompts: &loop [*loop]\n",
    "num-beams: " + "[" * 2000 + "\n",
)
"""YAML that runs code, or blows up, where it is read carelessly."""


class Surface(Protocol):
    """One kind of input."""

    def attack(self, rng: random.Random, place: Path) -> Callable[[], object]:
        """Write a hostile input into an empty folder; the call returned reads it, and may raise `BeamwiseError`."""


class Prompts:
    """JSONL files of prompts."""

    def __init__(self, folder: Path) -> None:
        where = save_tiny_folder(folder / "tokenizer", make_tiny_llama(vocab_size=48), CHAT_TEMPLATE)
        self.tokenizer = load_model(where, device="cpu")[1]

    def attack(self, rng: random.Random, place: Path) -> Callable[[], object]:
        rows = [{"id": f"p{n}", "prompt": "the cat sees", "answer": [n, {"x": 0.5}]} for n in range(4)]
        lines = [dumps(mutate_json(rng, row) if rng.random() < 0.4 else row) for row in rows]
        data = b"\n".join(lines)
        data = mutate_bytes(rng, data) if rng.random() < 0.6 else data
        path = place / "prompts.jsonl"
        path.write_bytes(data if rng.random() < 0.95 else data.decode(errors="replace").encode("utf-16"))

        def read() -> None:
            for prompt in read_prompts(path):
                for template in (True, False):
                    assert all(isinstance(token, int) for token in encode_prompt(self.tokenizer, prompt.text, template))
                json.dumps({**prompt.record, "id": prompt.id}, ensure_ascii=False).encode()

        return read


class Refused(Exception):
    """The command line said no as it should: exit code 2, one line."""


class Configs:
    """YAML files of options, through the command line up to where it would decode or train."""

    def __init__(self, folder: Path) -> None:
        nowhere = ["--target", "./no-such-model", "--out", str(folder / "out")]
        prompts = ["--prompts", "/no/such/prompts.jsonl"]
        distil = ["--prompts", '["/no/such.jsonl"]', "--work-dir", str(folder / "work"), *nowhere]
        alone = ["--trainer.devices", "1", "--trainer.num_nodes", "1", "--trainer.strategy", "auto"]  # no processes
        traces = ["--data.traces", "/no/such/traces", "--out", str(folder / "controller"), *alone]
        train = yaml.safe_load((CONFIGS / "train.yaml").read_text())
        logs = {"save_dir": str(folder / "logs"), "name": "logs"}
        train["trainer"]["logger"] = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": logs}
        self.commands: dict[str, tuple[list[str], dict[str, Any]]] = {
            "generate": ([*prompts, *nowhere], {"num-beams": 4, "do-sample": True, "top-p": 0.9, "dtype": "float32"}),
            "collect": ([*prompts, *nowhere], {"num-beams": [1, 2], "draft-widths": [4, 8], "sampling": "greedy"}),
            "distil": (distil, {"layers": [0, 1], "learning-rate": 1e-3, "validation-prompts": ["b.jsonl"]}),
            "evaluate": (["--traces", '["/no/such"]', "--out", str(folder / "out.json")], {"controller": "default"}),
            "train": (traces, train),
        }

    def attack(self, rng: random.Random, place: Path) -> Callable[[], object]:
        command = rng.choices(list(self.commands), (4, 4, 2, 1, 1))[0]
        overrides, valid = self.commands[command]
        path = place / "config.yaml"
        if rng.random() < 0.1:
            data = rng.choice(PAYLOADS).format(sentinel=place / "sentinel").encode()
        else:
            data = _yaml(mutate_json(rng, valid), rng.random() < 0.5)
        path.write_bytes(mutate_bytes(rng, data) if rng.random() < 0.5 else data)
        if rng.random() < 0.02:
            mutate_file(rng, path, place / "outside")
        verb = ["fit"] if command == "train" else []
        return lambda: run_command([command, *verb, "--config", str(path), *overrides])


def _yaml(value: Any, unicode: bool) -> bytes:
    try:
        return yaml.safe_dump(value, allow_unicode=unicode).encode(errors="surrogatepass")
    except RecursionError:
        return dumps(value)  # JSON is YAML, and its writer goes deeper


def run_command(arguments: list[str]) -> None:
    """Run the command line.

    Raises:
        Refused: exit code 2 and one line that says why.
        AssertionError: any other end but success.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    lines = [line for line in err.getvalue().splitlines() if line.startswith("beamwise: error: ")]
    assert "Traceback" not in err.getvalue(), err.getvalue()[-500:]
    if code == 0:
        return
    assert code == 2, (code, err.getvalue()[-500:])
    assert len(lines) == 1, err.getvalue()[-500:]
    raise Refused(lines[0])


class Traces:
    """Trace folders: manifests, and shards whose hashes are right."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "traces"
        with TraceWriter(self.base, "run", {"seed": 0}, prompts_per_shard=2) as writer:
            for prompt in range(4):
                features = torch.arange(len(FEATURE_NAMES), dtype=torch.float32)
                layers = [LayerRow(0, n, 0, 2, 2, 8, 8, True, True, features, [1, 5], [0.5, 0.1]) for n in (0, 1)]
                writer.add_prompt(f"p{prompt}", layers, [BlockRow(0, 0, 2, 2, 3, 2, 16, 18, 40, 0)])

    def attack(self, rng: random.Random, place: Path) -> Callable[[], object]:
        folder = fresh_copy(self.base, place / "traces")
        manifest = json.loads((folder / MANIFEST).read_text())
        kind = rng.random()
        if kind < 0.4:
            (folder / MANIFEST).write_bytes(dumps(mutate_json(rng, manifest)))
        elif kind < 0.5:
            (folder / MANIFEST).write_bytes(mutate_bytes(rng, (folder / MANIFEST).read_bytes()))
        elif kind < 0.55:
            name = rng.choice((MANIFEST, "layers/000000.parquet", "blocks/000001.parquet"))
            mutate_file(rng, folder / name, place / "outside")
        else:
            table, entry = rng.choice(("layer", "block")), rng.choice(manifest["shards"])
            path = folder / f"{table}s" / entry["name"]
            path.write_bytes(mutate_bytes(rng, path.read_bytes()) if kind < 0.9 else _strange_table(rng, path))
            if rng.random() < 0.9:
                entry[f"{table}_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            (folder / MANIFEST).write_text(json.dumps(manifest))

        def read() -> None:
            check_traces(folder)
            with TraceWriter(folder, "run", {"seed": 0}) as writer:
                writer.done_prompts()

        return read


def _strange_table(rng: random.Random, path: Path) -> bytes:
    """A valid Parquet file with other columns, empty cells or other rows."""
    table = pq.read_table(path)
    at = rng.randrange(table.num_columns)
    match rng.randrange(4):
        case 0:
            table = table.set_column(at, table.schema.field(at), pa.nulls(len(table), table.schema.field(at).type))
        case 1:
            table = table.remove_column(at)
        case 2:
            table = pa.concat_tables([table] * rng.choice((2, 50)))
        case _:
            table = table.set_column(at, table.schema.names[at], pa.array([str(rng.choice(STRANGE[:5]))] * len(table)))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


class Drafts:
    """Draft folders beside their target."""

    def __init__(self, folder: Path) -> None:
        self.target = make_tiny_llama(0, vocab_size=40, layers=3).to(torch.float32)
        self.bases = []
        for kind, token_ids in (("pruned", None), ("feature", torch.arange(2, 30))):
            draft = build_draft(self.target, kind, [0, 2], token_ids)
            save_draft(folder / kind, draft, self.target, DraftCheckpoint(kind, "tiny", [0, 2]))  # type: ignore[arg-type]
            self.bases.append(folder / kind)

    def attack(self, rng: random.Random, place: Path) -> Callable[[], object]:
        folder = fresh_copy(rng.choice(self.bases), place / "draft")
        config, weights = folder / "config.json", folder / "model.safetensors"
        kind = rng.random()
        if kind < 0.45:
            config.write_bytes(dumps(mutate_json(rng, json.loads(config.read_text()))))
        elif kind < 0.5:
            config.write_bytes(mutate_bytes(rng, config.read_bytes()))
        elif kind < 0.6:
            mutate_file(rng, rng.choice((config, weights)), place / "outside")
        else:
            weights.write_bytes(mutate_weights(rng, weights.read_bytes()))

        def read() -> None:
            draft = load_draft_model(str(folder), self.target)
            with torch.inference_mode():
                assert bool(draft.model.embed_tokens.weight.shape[0])

        return read


def mutate_weights(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with a changed header, length or body; or a pickle under its name."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + size], data[8 + size :]
    match rng.randrange(5):
        case 0:
            header = dumps(mutate_json(rng, json.loads(header)))
            return struct.pack("<Q", len(header)) + header + body
        case 1:
            claimed = rng.choice((0, 1, size - 1, size + 1, 2**20, 2**32, 2**63, 2**64 - 1))
            return struct.pack("<Q", claimed) + header + body
        case 2:
            return data[:8] + header + mutate_bytes(rng, body)
        case 3:
            return b"cos\nsystem\n(S'touch sentinel'\ntR."
        case _:
            return mutate_bytes(rng, data)


class Controllers:
    """Controller folders, their digests right more often than not."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "controller"
        network = WidthPredictor(PredictorConfig(2, (1, 2, 4, 8), 4))
        profile = LatencyProfile((1, 64), (20.0, 60.0), (3.0, 6.0))
        Controller(network, ControllerInfo(network.config, profile, {"target": "t"}, [1, 2])).save_pretrained(self.base)

    def attack(self, rng: random.Random, place: Path) -> Callable[[], object]:
        folder = fresh_copy(self.base, place / "controller")
        config, weights = folder / "config.json", folder / "model.safetensors"
        raw = json.loads(config.read_text())
        kind = rng.random()
        if kind < 0.1:
            mutate_file(rng, rng.choice((config, weights)), place / "outside")
        elif kind < 0.15:
            config.write_bytes(mutate_bytes(rng, config.read_bytes()))
        else:
            if kind < 0.4:
                weights.write_bytes(mutate_weights(rng, weights.read_bytes()))
                raw["weights_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
            else:
                raw = mutate_json(rng, raw)
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                raw["digest"] = checkpoint._digest(raw)
            config.write_bytes(dumps(raw))

        def read() -> None:
            controller = Controller.from_pretrained(folder, local_files_only=True)
            with torch.inference_mode():
                controller.network.prior_probs(torch.zeros(1, len(CONTEXT_NAMES)))
            controller.check_models({"target": "t"})
            controller.policy().start_block(1)

        return read


SURFACES: dict[str, Callable[[Path], Surface]] = {
    "prompts": Prompts,
    "configs": Configs,
    "traces": Traces,
    "drafts": Drafts,
    "controllers": Controllers,
}
