"""Distilled drafts: a few of the target's layers, its embeddings and (some rows of) its head, in a small checkpoint.

Two kinds. A ``pruned`` draft is the target with fewer layers. A ``feature`` draft also reads the target's last hidden
state at the token before (the idea of EAGLE, Li et al. 2024): its input is a fusion of that state with the token's
embedding, and where the target has not been yet, its own last hidden state stands in.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .errors import ConfigError, FormatError, ModelError
from .safe_files import check_types, read_json, read_tensors

FORMAT = "beamwise-draft"
VERSION = 1
_WEIGHTS = "model.safetensors"
_TOKEN_IDS = "draft_token_ids"
_PROBE = 64
"""Embedding values kept to recognise the target."""


@dataclass
class DraftCheckpoint:
    """What ``config.json`` of a draft says.

    Attributes:
        kind: ``"pruned"`` or ``"feature"``.
        target: name of the target it was distilled from.
        layers: which of the target's layers it keeps, in order.
        architecture: class of the target.
        target_shape: hidden size, layers and vocabulary of the target.
        target_probe: values of the target's embedding, to recognise its weights.
        training: how it was trained: data fingerprints, steps, settings.
        metrics: measured on held-out prompts.
        format: always ``"beamwise-draft"``.
        version: of this format.
    """

    kind: Literal["pruned", "feature"]
    target: str
    layers: list[int]
    architecture: str = ""
    target_shape: list[int] = field(default_factory=list)
    target_probe: list[float] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION


def _target_shape(target: PreTrainedModel) -> list[int]:
    config = target.config.get_text_config()
    return [int(config.hidden_size), int(config.num_hidden_layers), int(config.vocab_size)]


def _target_probe(target: PreTrainedModel) -> torch.Tensor:
    weight = cast(torch.Tensor, target.get_input_embeddings().weight).detach()
    rows = torch.linspace(0, weight.shape[0] - 1, _PROBE, device=weight.device).long()
    return weight[rows, torch.arange(_PROBE, device=weight.device) % weight.shape[1]].float().cpu()


def _layer_prefix(model: PreTrainedModel) -> str:
    """Name of the module list that holds the decoder layers."""
    count = int(model.config.get_text_config().num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return str(name)
    raise ModelError(f"{type(model).__name__} has no list of {count} decoder layers: it cannot be pruned to a draft")


def build_draft(
    target: PreTrainedModel, kind: str, layers: list[int], token_ids: torch.Tensor | None
) -> PreTrainedModel:
    """A draft with the target's own weights in the kept layers.

    Args:
        target: the target model; its embeddings are shared by reference, not copied.
        kind: ``"pruned"`` or ``"feature"``.
        layers: indices of the layers to keep, increasing.
        token_ids: int64 (Vd,), target token ids of the draft's vocabulary, or None for the whole one.

    Returns:
        A causal LM of the target's class, on its device and of its dtype, whose head gives Vd logits. It has the
        attributes ``draft_token_ids`` (or None) and, for the feature kind, ``fusion``.

    Raises:
        ConfigError: layers that the target does not have, or an unknown kind.
        ModelError: an architecture whose layers are not found.
    """
    count = int(target.config.get_text_config().num_hidden_layers)
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= count:
        raise ConfigError(f"layers is {layers}: give increasing indices between 0 and {count - 1}")
    if kind not in ("pruned", "feature"):
        raise ConfigError(f"kind is '{kind}': use pruned or feature")
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = len(layers)
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = [text_config.layer_types[layer] for layer in layers]
    with torch.random.fork_rng():
        draft: PreTrainedModel = type(target)(config)
    prefix = _layer_prefix(target) + "."
    renumbered = {f"{prefix}{old}.": f"{prefix}{new}." for new, old in enumerate(layers)}
    state = {}
    for name, tensor in target.state_dict().items():
        if name.startswith(prefix):
            head = f"{prefix}{name[len(prefix) :].split('.')[0]}."
            if head in renumbered:
                state[renumbered[head] + name[len(head) :]] = tensor
        else:
            state[name] = tensor
    draft.to(target.dtype).to(target.device).load_state_dict(state)  # type: ignore[arg-type]
    draft.set_input_embeddings(target.get_input_embeddings())
    _share_head(draft, target, token_ids)
    if kind == "feature":
        hidden = int(text_config.hidden_size)
        fusion = torch.nn.Linear(2 * hidden, hidden, bias=False, dtype=target.dtype, device=target.device)
        with torch.no_grad():  # at first a pruned draft: the embedding goes through, the state has yet to be learnt
            fusion.weight.zero_()
            fusion.weight[:, :hidden].copy_(torch.eye(hidden))
        draft.fusion = fusion
    cast(torch.nn.Module, draft).eval()
    return draft


def _share_head(draft: PreTrainedModel, target: PreTrainedModel, token_ids: torch.Tensor | None) -> None:
    head = cast(torch.nn.Linear, target.get_output_embeddings())  # type: ignore[no-untyped-call]
    if token_ids is not None:
        rows = token_ids.to(head.weight.device)
        small = torch.nn.Linear(head.in_features, rows.shape[0], bias=head.bias is not None)
        small.weight = torch.nn.Parameter(head.weight.detach()[rows].contiguous(), requires_grad=False)
        if head.bias is not None:
            small.bias = torch.nn.Parameter(head.bias.detach()[rows], requires_grad=False)
        head = small
    draft.set_output_embeddings(head)  # type: ignore[no-untyped-call]
    draft.draft_token_ids = token_ids  # type: ignore[assignment]


def own_state(draft: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The draft's own weights: all but the embeddings and the head, which are the target's."""
    shared = {id(draft.get_input_embeddings().weight)}
    shared.update(id(p) for p in cast(torch.nn.Module, draft.get_output_embeddings()).parameters())  # type: ignore[no-untyped-call]
    return {name: tensor for name, tensor in draft.named_parameters() if id(tensor) not in shared}


def save_draft(
    folder: str | os.PathLike[str], draft: PreTrainedModel, target: PreTrainedModel, info: DraftCheckpoint
) -> None:
    """Write a draft folder: ``config.json`` and ``model.safetensors`` in bfloat16, each renamed into place.

    Args:
        folder: made where it does not exist.
        draft: from `build_draft`.
        target: its target; recorded so that another one is refused.
        info: kind, layers, training and metrics; the target's marks are filled in.
    """
    info.architecture = type(target).__name__
    info.target_shape = _target_shape(target)
    info.target_probe = [round(value, 6) for value in _target_probe(target).tolist()]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in own_state(draft).items()}
    token_ids = cast("torch.Tensor | None", getattr(draft, "draft_token_ids", None))
    if token_ids is not None:
        tensors[_TOKEN_IDS] = token_ids.to(torch.int32).cpu()
    with tempfile.TemporaryDirectory(dir=path, prefix=".writing-") as scratch:
        save_file(tensors, Path(scratch) / _WEIGHTS)
        (Path(scratch) / "config.json").write_text(json.dumps(asdict(info), indent=2) + "\n")
        for name in (_WEIGHTS, "config.json"):
            (Path(scratch) / name).rename(path / name)


def is_draft_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a draft of ours (as against an ordinary Hugging Face model).

    Raises:
        FormatError: its config.json is a link out of it, or no regular file.
    """
    try:
        raw = read_json(folder, "config.json")
    except FormatError:
        raise
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def read_draft_config(folder: str | os.PathLike[str]) -> DraftCheckpoint:
    """The configuration of a draft folder.

    Raises:
        FormatError: it is not a draft folder, is damaged, or is of a newer version.
    """
    path = Path(folder) / "config.json"
    try:
        raw = read_json(folder, "config.json")
    except (OSError, ValueError) as error:
        raise FormatError(f"'{path}' cannot be read as a draft's configuration: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise FormatError(f"'{folder}' is not a Beamwise draft: its config.json has no format '{FORMAT}'")
    if raw.get("version") != VERSION:
        raise FormatError(
            f"'{folder}' is a draft of version {raw.get('version')}; this Beamwise reads version {VERSION}"
        )
    try:
        check_types(DraftCheckpoint, raw)
        info = DraftCheckpoint(**raw)
    except TypeError as error:
        raise FormatError(f"'{path}' has wrong fields: {error}") from error
    if len(info.target_probe) != _PROBE:
        raise FormatError(f"'{path}' has {len(info.target_probe)} values in 'target_probe', not {_PROBE}")
    return info


def load_draft(folder: str | os.PathLike[str], target: PreTrainedModel) -> PreTrainedModel:
    """Load a draft beside its target, sharing the target's embeddings.

    Args:
        folder: from `save_draft`.
        target: the model it was distilled from, in any dtype.

    Returns:
        The draft, as `build_draft` makes it, with the target's dtype and device.

    Raises:
        FormatError: a damaged or foreign folder.
        ModelError: another target.
    """
    info = read_draft_config(folder)
    if info.architecture != type(target).__name__ or info.target_shape != _target_shape(target):
        raise ModelError(
            f"The draft '{folder}' belongs to a {info.architecture} of shape {info.target_shape} ({info.target}), not "
            f"to this {type(target).__name__} of shape {_target_shape(target)}: load that target, or distil a draft"
        )
    if not torch.allclose(_target_probe(target), torch.tensor(info.target_probe), rtol=2e-2, atol=1e-4):
        raise ModelError(f"The draft '{folder}' belongs to other weights of {info.target}: distil one for this target")
    whole = sum(parameter.numel() for parameter in cast(torch.nn.Module, target).parameters())
    tensors = read_tensors(folder, _WEIGHTS, max_bytes=8 * whole + 2**24)  # a draft is a part of its target
    token_ids = tensors.pop(_TOKEN_IDS, None)
    if token_ids is not None:
        _check_token_ids(token_ids, info.target_shape[2], f"'{folder}/{_WEIGHTS}'")
    draft = build_draft(
        target, info.kind, info.layers, None if token_ids is None else token_ids.long().to(target.device)
    )
    own = own_state(draft)
    if set(own) != set(tensors) or any(
        own[name].shape != tensors[name].shape or not tensors[name].is_floating_point() for name in own
    ):
        raise FormatError(f"'{folder}/{_WEIGHTS}' does not hold the weights that its config.json describes")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    return draft


def _check_token_ids(token_ids: torch.Tensor, vocab_size: int, where: str) -> None:
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.dim() != 1 or token_ids.numel() == 0:
        raise FormatError(f"{where} has no list of integers as its '{_TOKEN_IDS}': distil the draft again")
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise FormatError(f"{where} maps to tokens outside the target's vocabulary: distil the draft again")
    if token_ids.unique().numel() != token_ids.numel():  # type: ignore[no-untyped-call]
        raise FormatError(f"{where} has the same token twice in its '{_TOKEN_IDS}': distil the draft again")
