"""Models for the commands: a target, its tokenizer and a draft; and silence from the libraries that load them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from beamwise.decoding.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ASSETS = Path(__file__).parent.parent / "assets"
"""Files shipped with the package."""


@dataclass(frozen=True)
class Models:
    """A target model, its tokenizer, and a draft model or None."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel | None


def silence_libraries() -> None:
    """Keep transformers' notices and loading bars, and warnings of the libraries, out of the command line's stderr."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", module=r"(transformers|torch|huggingface_hub)(\.|$)")


def load_models(target: str, draft: str, drafter: str, dtype: str, device: str) -> Models:
    """Load what decoding needs.

    Args:
        target: name, folder or Hugging Face id.
        draft: a draft folder of ours, a folder or id of any causal LM, ``"none"``, or ``"default"``: the draft that is
            shipped for the target, if there is one and the drafter uses a model.
        drafter: name of the drafter, as `decoding.drafter_choice.make_drafter` takes it.
        dtype: of both models.
        device: of both models.

    Raises:
        ConfigError: a draft for a drafter that uses none, or the other way round.
        ModelError: a model cannot be loaded or paired.
    """
    uses_model = drafter not in ("lookup", "none")
    if not uses_model and draft not in ("default", "none"):
        raise ConfigError(
            f"--draft '{draft}' has no part in --drafter {drafter}: leave it out, or use --drafter union or model"
        )
    where = shipped_draft(target) if draft == "default" else None if draft == "none" else draft
    if drafter in ("model", "union") and where is None:
        raise ConfigError(
            f"--drafter {drafter} needs a draft model, and --draft {draft} gives none for '{target}': "
            "pass --draft with a folder or id, or use --drafter lookup"
        )
    from beamwise.decoding.models import load_model

    model, tokenizer = load_model(target, dtype=dtype, device=device)
    draft_model = load_draft_model(where, model) if where is not None and uses_model else None
    return Models(model, tokenizer, draft_model)


def shipped_draft(target: str) -> str | None:
    """Folder of the draft that is shipped for a target, or None."""
    folder = ASSETS / f"{target}-draft"
    return str(folder) if "/" not in target and (folder / "config.json").is_file() else None


def shipped_controller(target: str) -> str | None:
    """Folder of the controller that is shipped for a target and its draft, or None."""
    folder = ASSETS / f"{target}-controller"
    return str(folder) if "/" not in target and (folder / "config.json").is_file() else None


def chosen_controller(controller: str, target: str, draft: str) -> str | None:
    """Folder or id that an option names; ``default`` is the shipped one, for its own pair of models alone."""
    if controller == "default":
        return shipped_controller(target) if draft == "default" else None
    return None if controller == "none" else controller


def load_draft_model(where: str, target: PreTrainedModel) -> PreTrainedModel:
    """A draft from a folder of ours (beside its target) or any causal LM by folder or id, on the target's device.

    Raises:
        FormatError: a damaged draft folder.
        ModelError: it cannot be loaded, or does not fit the target.
    """
    from beamwise.decoding.draft_model import is_draft_folder, load_draft
    from beamwise.decoding.models import load_model

    if is_draft_folder(where):
        return load_draft(where, target)
    try:
        return load_model(where, dtype=target.dtype, device=target.device)[0]
    except ModelError as error:
        raise ModelError(f"--draft: {error}") from error
