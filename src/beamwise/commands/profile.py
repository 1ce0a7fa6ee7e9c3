"""`beamwise profile`: what a forward of the target and of the draft costs on this device, by its tokens."""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from beamwise.controller.latency import MOST_COUNTS
from beamwise.decoding.errors import ConfigError

from .loading import Models, load_models, silence_libraries

if TYPE_CHECKING:
    import torch

    from beamwise.controller.latency import LatencyProfile
    from beamwise.controller.policy import LearnedWidth
    from beamwise.decoding.config import RunnerName
    from beamwise.decoding.drafters import Drafter
    from beamwise.decoding.widths import BlockPlanner, FixedWidth, LayerPlan, LayerView, Question, WidthPolicy


_BEAMS = 4
"""Beams while what a block costs besides forwards is measured."""
_LAYERS = 4
"""Layers drafted in a block, where any are."""
_WIDTH = 8
"""Candidates of each."""
_CALLS = 3
"""Calls for each of these measurements."""


@dataclass
class ProfileOptions:
    """Measure forwards of the target and the draft by token count, and what a layer and a block cost besides.

    A controller plans with these milliseconds. Measure on the device that will decode, and on a quiet machine.

    Attributes:
        out: File of the profile, .json or .yaml.
        controller: Folder of a controller that takes the profile in, besides those of other dtypes.
        target: Target model: a name, folder or Hugging Face id.
        draft: Draft model: a folder, a Hugging Face id, none, or default.
        drafter: What proposes tokens, as in `beamwise generate`.
        tokens: Token counts to measure.
        context: Tokens in the KV pool before the forward.
        repeats: Forwards per count.
        dtype: Of the weights and the forward pass.
        device: auto, cpu, cuda, ...
        runner: How forwards are run: as in `beamwise generate`, and to be the same as there.
    """

    out: str
    controller: str | None = None
    target: str = "smollm2-135m"
    draft: str = "default"
    drafter: Literal["auto", "model", "lookup", "union"] = "auto"
    tokens: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96])
    context: int = 256
    repeats: int = 15
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "auto"
    runner: Literal["auto", "eager", "buckets", "graphs", "compile"] = "auto"

    def __post_init__(self) -> None:
        if self.controller is not None and not Path(self.controller).is_dir():
            raise ConfigError(
                f"--controller '{self.controller}' is no folder: give one of a controller on this machine"
            )
        if not self.tokens or sorted(set(self.tokens)) != self.tokens or self.tokens[0] < 1:
            raise ConfigError(f"tokens is {self.tokens}: give increasing counts of at least 1")
        if len(self.tokens) > MOST_COUNTS:
            raise ConfigError(f"tokens has {len(self.tokens)} counts: measure at most {MOST_COUNTS}")
        if self.context < 2:
            raise ConfigError(f"context is {self.context}: at least 2 tokens")


def profile(options: ProfileOptions) -> Path:
    """Run the command.

    Raises:
        ConfigError: bad options.
        ModelError: a model that cannot be loaded or paired, or is not the controller's.
        FormatError: a damaged or foreign controller.
    """
    from beamwise.controller.checkpoint import Controller

    silence_libraries()
    controller = None if options.controller is None else Controller.from_pretrained(options.controller)
    if controller is not None:
        controller.check_models({"target": options.target, "draft": options.draft, "drafter": options.drafter})
    models = load_models(options.target, options.draft, options.drafter, options.dtype, options.device)
    measured = measure_profile(
        models, options.drafter, options.tokens, options.context, options.repeats, options.runner
    )
    measured.save(options.out)
    if controller is not None:
        controller.add_profile(measured)
        controller.save_pretrained(str(options.controller))
    return Path(options.out)


def measure_profile(
    models: Models, drafter: Any, tokens: list[int], context: int = 256, repeats: int = 15, runner: RunnerName = "auto"
) -> LatencyProfile:
    """A latency profile of a pair of models on the device they are on."""
    import torch

    from beamwise.controller.latency import measure
    from beamwise.decoding.causal import CausalModel
    from beamwise.decoding.compat import check_model
    from beamwise.decoding.drafter_choice import make_drafter
    from beamwise.decoding.kv_pool import KVPool

    positions = getattr(models.target.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and context + 2 * max(tokens) > positions:
        raise ConfigError(f"context {context} and {max(tokens)} tokens do not fit the model's {positions} positions")
    source = make_drafter(drafter, models.draft, models.target)
    device = models.target.device
    capacity = context + 2 * max(tokens)
    target = CausalModel(models.target)
    check_model(target)  # which chooses the attention that the engine runs
    pool = KVPool(target, rows=1, capacity=capacity, runner=runner)
    synchronise = torch.cuda.synchronize if device.type == "cuda" else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    with torch.inference_mode():
        target_forward = _target_forward(pool, context)
        draft_forward = None
        if source is not None and models.draft is not None:
            draft_forward = _draft_forward(source, context, capacity, runner)
        forwards = measure(target_forward, draft_forward, tokens, repeats, synchronise, device=name)
    dtype = str(models.target.dtype).removeprefix("torch.")
    return dataclasses.replace(forwards, dtype=dtype, **_overheads(models, source, runner, forwards))  # type: ignore[arg-type]


def _target_forward(pool: Any, context: int) -> Callable[[int], object]:
    import torch

    from beamwise.decoding.forest import Forest

    def forward(count: int) -> object:
        tokens = torch.arange(context + count, device=pool.model.device) % pool.model.vocab_size
        forest = Forest(tokens[: context - 1], pool.model.device)
        root = forest.add_root(tokens[:1])
        if count > 1:
            forest.add(root.repeat(count - 1), tokens[: count - 1])
        pool.filled[0] = min(pool.filled[0], context - 1)
        return pool.forward([0], [forest], [count if pool.filled[0] else 1])

    forward(1)  # fills the context
    return forward


def _draft_forward(source: Drafter, context: int, capacity: int, runner: RunnerName) -> Callable[[int], object]:
    import torch

    from beamwise.decoding.drafters import ModelDrafter, UnionDrafter
    from beamwise.decoding.forest import Forest

    model = source.model if isinstance(source, UnionDrafter) else source
    assert isinstance(model, ModelDrafter)
    source.start(1, capacity, runner)
    device = model.model.device

    def forward(count: int) -> object:
        tokens = torch.arange(context + count, device=device) % model.model.vocab_size
        forest = Forest(tokens[: context - 1], device)
        root = forest.add_root(tokens[:1])
        forest.add(root.repeat(count), tokens[:count])
        model.pool.filled[0] = min(model.pool.filled[0], context)  # the root too is done
        sequences = tokens[: context + 1].repeat(count, 1)
        return source.propose([0], [forest], [sequences])

    forward(1)
    return forward


@dataclass(frozen=True)
class _AskedWidth:
    """Asks a controller about every layer, and plans fixed widths whatever it answers."""

    learned: LearnedWidth
    fixed: FixedWidth

    def start_block(self, num_beams: int) -> BlockPlanner:
        return _AskedPlanner(self.learned, self.fixed.start_block(num_beams), num_beams)


@dataclass(frozen=True)
class _AskedPlanner:
    learned: LearnedWidth
    fixed: BlockPlanner
    num_beams: int

    def next_layer(self, view: LayerView) -> LayerPlan | None:
        plan = self.fixed.next_layer(view)
        if plan is not None:
            self.learned.probs(view.context_features, self.num_beams, "prior")
            self.learned.probs(view.features, self.num_beams, "full")
        return plan

    def ask(self, view: LayerView) -> Question | None:
        """As a learned policy does where reads cost a wait."""
        from beamwise.decoding.widths import Question

        plan = self.fixed.next_layer(view)
        if plan is None:
            return None
        return Question([self.learned.probs_on_device(view.features, self.num_beams)], plan.draft_width, lambda _: plan)


def _overheads(
    models: Models, source: Drafter | None, runner: RunnerName, forwards: LatencyProfile
) -> dict[str, float]:
    """Milliseconds besides the forwards, as `LatencyProfile` names them."""
    import torch

    from beamwise.controller.policy import LearnedWidth
    from beamwise.controller.predictor import WidthPredictor
    from beamwise.decoding.host import reads_are_free
    from beamwise.decoding.widths import FixedWidth

    device, vocab_size = models.target.device, models.target.config.get_text_config().vocab_size
    prompt = torch.arange(100, device=device).unsqueeze(0) % vocab_size
    drafted = FixedWidth(_LAYERS, _WIDTH)
    kinds: dict[str, tuple[WidthPolicy, bool]] = {
        "sampled": (FixedWidth(0, _WIDTH), True),
        "drafted": (drafted, False),
        "asked": (_AskedWidth(LearnedWidth(WidthPredictor(), forwards), drafted), False),
        "plain": (FixedWidth(0, _WIDTH), False),
    }
    per_block, per_call = {}, 0.0
    for kind, (policy, do_sample) in kinds.items():
        calls = _clocked_calls(models, source, runner, policy, do_sample, prompt)
        per_block[kind], per_call = (statistics.median(times) for times in zip(*calls, strict=True))
    plain, asks = per_block["plain"], _LAYERS * (2 if reads_are_free(device) else 1)
    return {
        "layer_ms": max(per_block["drafted"] - plain, 0.0) / _LAYERS,
        "block_ms": plain,
        "call_ms": max(per_call, 0.0),
        "sampling_ms": max(per_block["sampled"] - plain, 0.0) / _BEAMS,
        "ask_ms": max(per_block["asked"] - per_block["drafted"], 0.0) / asks,
    }


def _clocked_calls(
    models: Models,
    source: Drafter | None,
    runner: RunnerName,
    policy: WidthPolicy,
    do_sample: bool,
    prompt: torch.Tensor,
) -> list[tuple[float, float]]:
    """Milliseconds besides the forwards of some calls, after one to warm up: (of a block, of the call besides)."""
    import torch

    from beamwise.decoding.generate import SpeculativeBeams

    beams = SpeculativeBeams(drafter="none" if source is None else source, policy=policy, runner=runner)
    beams.measure = True
    arguments = {"num_beams": _BEAMS, "max_new_tokens": 32, "eos_token_id": None, "custom_generate": beams}
    arguments |= {"do_sample": True, "top_k": 50} if do_sample else {"do_sample": False}
    calls = []
    for _ in range(_CALLS + 1):
        before, start = beams.seconds, time.perf_counter()
        models.target.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)  # type: ignore[operator]
        if models.target.device.type == "cuda":
            torch.cuda.synchronize(models.target.device)
        wall = time.perf_counter() - start
        seconds = {part: total - before.get(part, 0.0) for part, total in beams.seconds.items()}
        blocks = beams.stats.target_forwards
        calls.append((1e3 * seconds["other"] / blocks, 1e3 * (wall - sum(seconds.values()))))
    return calls[1:]
