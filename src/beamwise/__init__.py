"""Beamwise: lossless speculative beam decoding with a learned width controller."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import SpeculativeBeams, shipped_beams
    from .decoding import errors
    from .decoding.errors import BeamwiseError
    from .decoding.models import load_model
    from .decoding.stream import decode_stream

__all__ = [
    "BeamwiseError",
    "SpeculativeBeams",
    "__version__",
    "decode_stream",
    "errors",
    "load_model",
    "shipped_beams",
]
__version__ = version("beamwise")

_HOME = {
    "BeamwiseError": "decoding.errors",
    "SpeculativeBeams": "api",
    "decode_stream": "decoding.stream",
    "load_model": "decoding.models",
    "shipped_beams": "api",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `beamwise --help` does not wait for torch."""
    if name == "errors":
        return import_module(".decoding.errors", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'beamwise' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
