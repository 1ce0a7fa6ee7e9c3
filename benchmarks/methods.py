"""Ways to decode, side by side: each a name and a factory that makes a decoder of one prompt.

A method that cannot run under a setting (several beams for assisted generation, no controller on disk, …) says why in
an `UnavailableError`; the table gives the reason in place of figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from beamwise.api import SpeculativeBeams
from beamwise.commands.controllers import controller_limit
from beamwise.commands.decode import cut_at_eos, pad_left
from beamwise.commands.loading import Models
from beamwise.decoding.engine import BlockRecord
from beamwise.decoding.errors import ConfigError
from beamwise.decoding.paper_width import PaperWidth
from beamwise.decoding.stats import DecodeStats
from beamwise.decoding.widths import FixedWidth

from .settings import MethodOptions, Output, Setting, UnavailableError, min_width, parse_shape

Observer = Callable[[BlockRecord], None]


@dataclass(frozen=True)
class Decoder:
    """What a factory makes.

    Attributes:
        decode: decodes a prompt; this call is timed.
        prepare: called before it with the same prompt, and not timed: seeds, hindsight.
        observe: sets who else is shown the blocks of the engine; None where there is no engine of ours.
    """

    decode: Callable[[list[int]], Output]
    prepare: Callable[[list[int]], None] = lambda ids: None
    observe: Callable[[Observer | None], None] | None = None


Factory = Callable[[Models, Setting, MethodOptions], Decoder]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: in the table.
        make: the factory; raises `UnavailableError`.
        exact: its output is due to be that of Beamwise's target alone; ``"greedy"``: only without sampling.
    """

    name: str
    make: Factory
    exact: bool | str = False

    def is_exact(self, setting: Setting) -> bool:
        """Whether the output is due to be that of the target alone under a setting."""
        return self.exact is True or (self.exact == "greedy" and not setting.do_sample)


@contextmanager
def counted(model: Any, clock: bool) -> Iterator[list[float]]:
    """Count a module's forwards inside the block: [forwards, seconds]; seconds stay 0 without ``clock``."""
    tally, started = [0.0, 0.0], [0.0]

    def before(*_: Any) -> None:
        started[0] = time.perf_counter()

    def after(*_: Any) -> None:
        tally[0] += 1
        tally[1] += time.perf_counter() - started[0] if clock else 0.0

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield tally
    finally:
        for hook in hooks:
            hook.remove()


def _transformers(models: Models, setting: Setting, options: MethodOptions, **extra: Any) -> Decoder:
    """Transformers' own search. A GPU runs behind the host, so forwards are clocked on the CPU alone."""
    assistant, clock = extra.get("assistant_model"), setting.device == "cpu"
    generate, arguments = cast(Any, models.target).generate, {**options.arguments(setting), **extra}

    def decode(ids: list[int]) -> Output:
        stats, seconds = DecodeStats(), {}
        with counted(models.target, clock) as target:
            if assistant is None:
                sequence = generate(**pad_left([ids], models.target.device), **arguments)
            else:
                with counted(assistant, clock) as draft:
                    sequence = generate(**pad_left([ids], models.target.device), **arguments)
                stats.draft_forwards, seconds["draft"] = int(draft[0]), draft[1]
        new = cut_at_eos(sequence[0, len(ids) :].cpu(), models).tolist()
        stats.target_forwards = int(target[0])
        stats.layers = len(new) if extra else stats.target_forwards  # without drafts one position a forward
        stats.widths = setting.num_beams * stats.layers
        stats.peak_slots = setting.num_beams * (len(ids) + stats.layers - 1)  # one cache per beam
        return Output([new], stats, {**seconds, "target": target[1]} if clock else {})

    return Decoder(decode, lambda _: cast(None, torch.manual_seed(options.seed)))


def _assisted(models: Models, setting: Setting, options: MethodOptions, draft: bool) -> Decoder:
    if setting.num_beams > 1:
        raise UnavailableError("transformers' assisted generation has one beam only")
    if not draft:
        return _transformers(models, setting, options, prompt_lookup_num_tokens=options.lookup_tokens)
    if models.draft is None:
        raise UnavailableError("there is no draft model")
    vocabularies = [model.config.get_text_config().vocab_size for model in (models.draft, models.target)]
    own = type(models.draft).__module__.startswith("transformers.models.")
    if not own or getattr(models.draft, "draft_token_ids", None) is not None or len(set(vocabularies)) > 1:
        raise UnavailableError("the draft is not a plain Hugging Face model with the target's vocabulary")
    return _transformers(models, setting, options, assistant_model=models.draft)


class Acceptance:
    """An observer: how often the layers of a block were reached, and covered, by depth and width."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], list[int]] = {}
        self._other: Observer | None = None

    def tell(self, other: Observer | None) -> None:
        """Show the blocks to another observer too, or no longer."""
        self._other = other

    def __call__(self, record: BlockRecord) -> None:
        """Take in one block."""
        if self._other is not None:
            self._other(record)
        for layer, outcome in enumerate(record.verification.layers):
            if outcome.drafted:
                cell = self.cells.setdefault((layer, outcome.width), [0, 0])
                cell[0] += 1
                cell[1] += outcome.covered

    def take(self) -> list[list[int]]:
        """[layer, width, reached, covered] since the last call."""
        cells, self.cells = self.cells, {}
        return [[*key, *counts] for key, counts in sorted(cells.items())]


def _beamwise(
    models: Models, setting: Setting, options: MethodOptions, speculate: bool = True, **settings: Any
) -> Decoder:
    """A decoder of ours. Parts are clocked on the CPU alone: on a GPU that would wait for the device."""
    acceptance = Acceptance()
    beams = SpeculativeBeams(
        models.draft if speculate else None,
        cast(Any, options.drafter) if speculate else "none",
        seed=options.seed,
        batch_size=1,
        observer=acceptance,
        measure=setting.device == "cpu",
        **settings,
    )
    arguments = options.arguments(setting)
    return Decoder(lambda ids: run_beams(models, beams, acceptance, ids, arguments), observe=acceptance.tell)


def run_beams(
    models: Models, beams: SpeculativeBeams, acceptance: Acceptance, ids: list[int], arguments: dict[str, Any]
) -> Output:
    """One call of ``generate`` with a decoder of ours, whose observer is ``acceptance``."""
    before = beams.seconds
    sequence = cast(Any, models.target).generate(
        **pad_left([ids], models.target.device), **arguments, custom_generate=beams
    )
    new = cut_at_eos(sequence[0, len(ids) :].cpu(), models).tolist()
    seconds = {part: total - before.get(part, 0.0) for part, total in beams.seconds.items()}
    return Output([new], beams.stats, seconds, acceptance.take())


def _learned(models: Models, setting: Setting, options: MethodOptions, dynamic: bool) -> Decoder:
    if options.controller is None:
        raise UnavailableError("there is no controller")
    limit = controller_limit(options.controller)
    if setting.num_beams > limit:
        raise UnavailableError(f"the controller plans for at most {limit} beams")
    mode: dict[str, Any] = {
        "width_mode": "dynamic",
        "quality": options.quality,
        "min_width": min_width(setting, options),
    }
    return _beamwise(models, setting, options, controller=options.controller, **(mode if dynamic else {}))


def _fixed(models: Models, setting: Setting, options: MethodOptions, shape: str) -> Decoder:
    return _beamwise(models, setting, options, policy=FixedWidth(*parse_shape(shape, setting.num_beams)))


def _paper(models: Models, setting: Setting, options: MethodOptions, shape: str, verification: str) -> Decoder:
    if verification == "rejection" and not setting.do_sample:
        raise UnavailableError("rejection verification is for sampling")
    policy = PaperWidth(*parse_shape(shape, setting.num_beams), options.threshold)
    mode: dict[str, Any] = {
        "width_mode": "dynamic",
        "min_width": min_width(setting, options),
        "verification": verification,
    }
    return _beamwise(models, setting, options, policy=policy, **mode)


def _oracle(models: Models, setting: Setting, options: MethodOptions) -> Decoder:
    """The best plan in hindsight by the controller's latency profile; finding it is not timed."""
    if options.controller is None:
        raise UnavailableError("it plans by a controller's latency profile, and there is no controller")
    from beamwise.controller.checkpoint import Controller

    from .oracle import Survey, best_plan

    profile = Controller.from_pretrained(options.controller).policy(dtype=setting.dtype).profile
    arguments, acceptance = options.arguments(setting), Acceptance()
    survey_beams = SpeculativeBeams(models.draft, cast(Any, options.drafter), seed=options.seed, batch_size=1)
    beams = SpeculativeBeams(
        models.draft,
        cast(Any, options.drafter),
        seed=options.seed,
        batch_size=1,
        observer=acceptance,
        measure=setting.device == "cpu",
    )

    def prepare(ids: list[int]) -> None:
        survey = Survey(*options.oracle)
        survey_beams.policy = survey
        survey_beams.engine(models.target, setting.num_beams).observer = survey
        layers = survey.explore(lambda: run_beams(models, survey_beams, acceptance, ids, arguments).stats.layers)
        beams.policy = best_plan(survey.starts, layers, profile)
        acceptance.take()

    return Decoder(lambda ids: run_beams(models, beams, acceptance, ids, arguments), prepare)


TARGET_ONLY = "target only"
TRANSFORMERS = "transformers"
NAMES = ("transformers", "assisted", "target_only", "fixed", "paper", "rejection", "learned", "dynamic", "oracle")
"""Families of methods, as options name them."""


def make_methods(names: Sequence[str], shapes: Sequence[str]) -> list[Method]:
    """The methods of some families; fixed widths, the paper's rule and rejection once for each shape.

    Args:
        names: of `NAMES`.
        shapes: as `parse_shape` takes them.

    Raises:
        ConfigError: an unknown name, a name twice, or a malformed shape.
    """
    unknown = sorted(set(names) - set(NAMES))
    if unknown or not names or len(set(names)) < len(names) or len(set(shapes)) < len(shapes):
        raise ConfigError(
            f"methods are {list(names)}, shapes {list(shapes)}: take methods from {list(NAMES)}, each once"
        )
    for shape in shapes:
        parse_shape(shape, 1)
    families: dict[str, list[Method]] = {
        "transformers": [Method(TRANSFORMERS, _transformers, "greedy")],
        "assisted": [
            Method("transformers, assisted by lookup", partial(_assisted, draft=False), "greedy"),
            Method("transformers, assisted by draft", partial(_assisted, draft=True), "greedy"),
        ],
        "target_only": [Method(TARGET_ONLY, partial(_beamwise, speculate=False), True)],
        "fixed": [Method(f"fixed {shape}", partial(_fixed, shape=shape), True) for shape in shapes],
        "paper": [
            Method(f"paper's rule {shape}", partial(_paper, shape=shape, verification="coupled")) for shape in shapes
        ],
        "rejection": [
            Method(f"paper's rule {shape}, rejection", partial(_paper, shape=shape, verification="rejection"))
            for shape in shapes
        ],
        "learned": [Method("learned", partial(_learned, dynamic=False), True)],
        "dynamic": [Method("learned widths", partial(_learned, dynamic=True))],
        "oracle": [Method("oracle", _oracle, True)],
    }
    return [method for name in names for method in families[name]]
