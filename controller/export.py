"""Exports of a predictor for other runtimes: a ``torch.export`` program and ONNX, each checked against the original."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from beamwise.decoding.errors import NumericalError, UnsupportedError
from beamwise.decoding.features import FEATURE_NAMES

from .predictor import WidthPredictor

TOLERANCE = 1e-5
"""Largest difference of a probability that an export may show."""


def export_program(predictor: WidthPredictor) -> ExportedProgram:
    """The predictor as a program: features float32 (N, F) to success probabilities (N, W, J), for any N >= 1.

    Raises:
        NumericalError: the program's probabilities differ from the predictor's.
    """
    predictor = predictor.eval()
    features = _probe(predictor)
    batch = Dim("batch", min=1, max=1 << 20)
    program = torch.export.export(predictor, (features,), dynamic_shapes={"features_NF": {0: batch}})
    for count in (1, len(features)):
        with torch.inference_mode():
            found = program.module()(features[:count])
        _check(predictor, features[:count], found.numpy(), "torch.export program")
    return program


def export_onnx(predictor: WidthPredictor, path: str | os.PathLike[str]) -> Path:
    """Write the predictor as ONNX (input ``features``, output ``success_probs``), for any batch size.

    Raises:
        UnsupportedError: onnx, onnxscript or onnxruntime is missing.
        NumericalError: ONNX runtime's probabilities differ from the predictor's.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"ONNX export needs {', '.join(missing)}: pip install 'beamwise[dev]'")
    import onnxruntime

    onnx_program = torch.onnx.export(
        export_program(predictor),
        input_names=["features"],
        output_names=["success_probs"],
        verbose=False,
        external_data=False,
    )
    assert onnx_program is not None
    scratch = Path(path).with_name(f".{Path(path).name}.writing")
    onnx_program.save(str(scratch))
    session = onnxruntime.InferenceSession(str(scratch), providers=["CPUExecutionProvider"])
    features = _probe(predictor)
    for count in (1, len(features)):
        (found,) = session.run(["success_probs"], {"features": features[:count].numpy()})
        _check(predictor, features[:count], found, "ONNX model")
    scratch.replace(path)
    return Path(path)


def save_program(predictor: WidthPredictor, path: str | os.PathLike[str]) -> Path:
    """Write the ``torch.export`` program (``.pt2``); see `export_program`."""
    scratch = Path(path).with_name(f".{Path(path).name}.writing.pt2")
    torch.export.save(export_program(predictor), scratch)
    scratch.replace(path)
    return Path(path)


def _probe(predictor: WidthPredictor) -> torch.Tensor:
    """Features around what the predictor was trained on, float32 (64, F)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(64, len(FEATURE_NAMES), generator=generator)
    return predictor.full.mean + 2.0 * predictor.full.std * noise


def _check(predictor: WidthPredictor, features: torch.Tensor, found: np.ndarray, kind: str) -> None:
    with torch.inference_mode():
        expected = predictor.success_probs(features).numpy()
    worst = float(np.abs(found - expected).max())
    if not worst <= TOLERANCE:
        raise NumericalError(f"The {kind} differs from the predictor by {worst:.2e} (allowed: {TOLERANCE:.0e})")
