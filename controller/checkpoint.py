"""A controller on disk: a folder with ``config.json`` and ``model.safetensors``, and nothing pickled (design §6)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file

from beamwise.decoding.errors import ConfigError, FormatError, ModelError
from beamwise.decoding.features import SCHEMA_VERSION, schema_hash
from beamwise.decoding.safe_files import check_types, inside, read_json, read_tensors

from .info import FORMAT, VERSION, ControllerInfo, Shape
from .latency import MOST_COUNTS, LatencyProfile
from .policy import LearnedWidth
from .predictor import PredictorConfig, WidthPredictor

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_MAX_WEIGHTS = 2**28
"""Longest weights file accepted, in bytes: predictors have a few thousand parameters."""
_LIMITS = {
    "max_gamma": 64,
    "max_width": 256,
    "num_beams": 256,
    "edges' last": 1024,
    "profile's tokens": MOST_COUNTS,
    "profiles": 16,
}
_MODEL_CARD = """---
{{ card_data }}
---

A width controller for Beamwise: it decides how deep and how wide to draft in
speculative beam decoding. `config.json` names the models it was trained for and what was measured on held-out prompts.
Use it with `SpeculativeBeams(draft_model=..., controller="this repository")`.
"""


class Controller(
    ModelHubMixin,
    model_card_template=_MODEL_CARD,
    library_name="beamwise",
    tags=["speculative-decoding", "beam-search"],
    license="apache-2.0",
):
    """A trained predictor and all that is needed to plan with it.

    ``save_pretrained`` and ``push_to_hub`` come from the Hub's mixin.

    Args:
        network: the predictor.
        info: its description.
    """

    def __init__(self, network: WidthPredictor, info: ControllerInfo) -> None:
        self.network = network.eval()
        self.info = info

    def policy(self, profile: LatencyProfile | None = None, dtype: str = "", **settings: Any) -> LearnedWidth:
        """The width policy.

        Args:
            profile: of this device; None takes the controller's own.
            dtype: of the target, as ``"float32"``; chooses among the controller's profiles, where it has one for it.
            **settings: passed on to `LearnedWidth`; by default it goes no further than the traces went in depth, draft
                width and beams.

        Raises:
            ConfigError: a setting out of range, or no profile at all.
        """
        info = self.info
        profile = profile or next((one for one in info.other_profiles if one.dtype == dtype != ""), info.profile)
        if profile is None:
            raise ConfigError("This controller has no latency profile: measure one with beamwise profile and give it")
        limits = {"max_gamma": info.max_gamma, "max_draft_width": info.max_draft_width}
        limits["max_beams"] = max(info.num_beams, default=None)
        known = {name: value for name, value in limits.items() if value is not None}
        return LearnedWidth(self.network, profile, **{**known, **settings})

    def add_profile(self, profile: LatencyProfile) -> None:
        """Take in a profile, in place of one of the same dtype; the first one given stays the one for other dtypes."""
        info = self.info
        if info.profile is None or info.profile.dtype == profile.dtype:
            info.profile = profile
        else:
            info.other_profiles = [one for one in info.other_profiles if one.dtype != profile.dtype] + [profile]

    def check_models(self, models: Mapping[str, str]) -> None:
        """Refuse a pair of models other than the one it learned from.

        Args:
            models: names of the running target, draft, drafter; missing ones are not checked.

        Raises:
            ModelError: they differ.
        """
        for role, name in models.items():
            known = self.info.models.get(role, name)
            if known != name:
                raise ModelError(
                    f"This controller was trained with the {role} '{known}', not '{name}': use that one, or collect "
                    "traces of yours and train a controller"
                )

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write both files, each renamed into place, the configuration last: without it there is no controller."""
        scratch = save_directory / f".{_WEIGHTS}.writing"
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.network.state_dict().items()}
        save_file(state, scratch)
        weights_sha256 = _sha256(scratch)
        scratch.replace(save_directory / _WEIGHTS)
        raw = json.loads(json.dumps({**asdict(self.info), "weights_sha256": weights_sha256}))
        raw["digest"] = _digest(raw)
        scratch = save_directory / f".{_CONFIG}.writing"
        scratch.write_text(json.dumps(raw, indent=2) + "\n")
        scratch.replace(save_directory / _CONFIG)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Controller:
        """Load a controller.

        Args:
            pretrained_model_name_or_path: a folder, or a Hub id.
            revision: of the Hub repository.
            token: for private Hub repositories.
            cache_dir: of the Hub.
            local_files_only: never ask the Hub.

        Raises:
            ModelError: neither a folder nor found on the Hub.
            FormatError: a foreign, damaged or changed controller, or one of another format or feature schema.
        """
        name = str(pretrained_model_name_or_path)
        folder = Path(name)
        if not folder.is_dir():
            try:
                downloaded = snapshot_download(
                    name,
                    revision=revision,
                    token=token,
                    cache_dir=cache_dir,
                    local_files_only=local_files_only,
                    allow_patterns=[_CONFIG, _WEIGHTS],
                )
            except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
                raise ModelError(
                    f"There is no controller '{name}': give a folder from beamwise train, or a Hub id ({error})"
                ) from error
            folder = Path(downloaded)
        raw = _read_config(folder)
        network, info = _build(folder, raw)
        return cls(network, info)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(raw: Mapping[str, Any]) -> str:
    """Fingerprint of a configuration (its own digest left out)."""
    rest = {name: value for name, value in raw.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    try:
        raw = read_json(folder, _CONFIG)
    except (OSError, ValueError) as error:
        raise FormatError(f"'{path}' cannot be read as a controller's configuration: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise FormatError(f"'{folder}' is not a Beamwise controller: its {_CONFIG} has no format '{FORMAT}'")
    if raw.get("version") != VERSION:
        raise FormatError(
            f"'{folder}' is a controller of format version {raw.get('version')}, this Beamwise reads version "
            f"{VERSION}: update Beamwise, or train a controller with this one"
        )
    if raw.get("schema") != schema_hash():
        raise FormatError(
            f"'{folder}' was trained on feature schema {raw.get('schema')} (version {raw.get('schema_version')}), the "
            f"engine computes {schema_hash()} (version {SCHEMA_VERSION}): update Beamwise, or train a controller again"
        )
    if raw.get("digest") != _digest(raw):
        raise FormatError(f"'{path}' was changed or damaged since it was written: fetch or train the controller again")
    return raw


def _build(folder: Path, raw: dict[str, Any]) -> tuple[WidthPredictor, ControllerInfo]:
    path = folder / _WEIGHTS
    try:
        if _sha256(inside(folder, _WEIGHTS, _MAX_WEIGHTS)) != raw["weights_sha256"]:
            raise FormatError(f"'{path}' was changed or damaged since it was written: fetch the controller again")
        state = read_tensors(folder, _WEIGHTS, _MAX_WEIGHTS)
        config = _predictor_config(raw["predictor"])
        with torch.device("meta"):  # whatever shape it claims, memory is taken by the file's tensors alone
            network = WidthPredictor(config)
        if any(tensor.dtype != torch.float32 for tensor in state.values()):
            raise TypeError("weights that are not float32")
        network.load_state_dict(state, assign=True)
        profile = None if raw["profile"] is None else LatencyProfile.from_dict(raw["profile"])
        others = [LatencyProfile.from_dict(one) for one in raw.get("other_profiles", [])]
        taken = {"weights_sha256", "digest", "predictor", "profile", "other_profiles"}
        rest = {name: raw[name] for name in set(raw) - taken}
        check_types(ControllerInfo, rest)
        info = ControllerInfo(predictor=config, profile=profile, other_profiles=others, **rest)
        _check_limits(info)
    except (OSError, KeyError, TypeError, RuntimeError) as error:
        raise FormatError(f"'{folder}' does not hold the controller that its {_CONFIG} describes: {error}") from error
    return network, info


def _check_limits(info: ControllerInfo) -> None:
    """A policy's tables grow with these, before any decoding: a hostile file must not make them endless.

    Raises:
        TypeError: a number far beyond what decoding can use.
    """
    profiles = [one for one in (info.profile, *info.other_profiles) if one is not None]
    points = max((len(one.tokens) for one in profiles), default=0)
    numbers = {
        "max_gamma": info.max_gamma or 0,
        "max_width": info.predictor.max_width,
        "profile's tokens": points,
        "profiles": len(profiles),
    }
    numbers |= {"num_beams": max(info.num_beams, default=1), "edges' last": info.predictor.edges[-1]}
    for name, number in numbers.items():
        if number > (limit := _LIMITS[name]):
            raise TypeError(f"its {name} is {number}, more than {limit}")


def _predictor_config(raw: Any) -> PredictorConfig:
    """The shape of the predictor.

    Raises:
        TypeError: it is no such thing.
        ConfigError: a value out of range.
    """
    shape = Shape(**raw)
    check_types(Shape, raw)
    return PredictorConfig(shape.max_width, tuple(shape.edges), shape.hidden)
