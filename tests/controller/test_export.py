"""Exports give the predictor's own probabilities, for any number of rows, and after calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from beamwise.controller import export
from beamwise.controller.export import export_onnx, export_program, save_program
from beamwise.controller.predictor import PredictorConfig, WidthPredictor
from beamwise.decoding.errors import NumericalError
from beamwise.decoding.features import FEATURE_NAMES


@pytest.fixture(scope="module")
def predictor() -> WidthPredictor:
    torch.manual_seed(0)
    predictor = WidthPredictor(PredictorConfig(max_width=3, hidden=8))
    predictor.set_statistics(torch.randn(len(FEATURE_NAMES)), torch.rand(len(FEATURE_NAMES)) + 0.5)
    predictor.full.scale.fill_(1.3)
    predictor.full.shift.normal_()
    return predictor.eval()


def test_program(predictor: WidthPredictor, tmp_path: Path) -> None:
    path = save_program(predictor, tmp_path / "predictor.pt2")
    loaded = torch.export.load(path).module()
    features = torch.randn(7, len(FEATURE_NAMES))
    torch.testing.assert_close(loaded(features), predictor(features))
    assert [item.name for item in tmp_path.iterdir()] == ["predictor.pt2"]


def test_onnx(predictor: WidthPredictor, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = export_onnx(predictor, tmp_path / "predictor.onnx")
    session = onnxruntime.InferenceSession(str(path))
    features = torch.randn(5, len(FEATURE_NAMES))
    (found,) = session.run(["success_probs"], {"features": features.numpy()})
    assert np.abs(found - predictor(features).detach().numpy()).max() < export.TOLERANCE


def test_a_difference_is_an_error(predictor: WidthPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(NumericalError, match="differs from the predictor"):
        export_program(predictor)
