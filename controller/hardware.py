"""Hardware files: a latency profile as YAML, measured or computed from a data sheet (docs/simulator.md).

A roofline: a forward over n tokens reads the weights once and does two operations per parameter and token, so it takes
the longer of the two, and the host's time besides. What it leaves out (reading the KV cache, attention, kernels that
miss the peak) makes a real device slower; ``bandwidth_share`` and ``compute_share`` say by how much.
"""

from __future__ import annotations

import math
import os
from typing import Any

from beamwise.decoding.errors import FormatError

from .latency import OVERHEADS, LatencyProfile, read_yaml

_TOKENS = tuple(2**power for power in range(13))
_DEVICE_FIELDS = ("bandwidth_gb_s", "compute_tflop_s", "bandwidth_share", "compute_share", "forward_ms")
_MODEL_FIELDS = ("parameters", "bytes_per_parameter")
_TEXTS = ("device", "source")
_SMALLEST, _LARGEST = 1e-9, 1e18
"""Of any number in a file: within them no time overflows."""


def load_hardware(path: str | os.PathLike[str]) -> LatencyProfile:
    """Read a hardware file: a profile of `beamwise profile`, or a roofline.

    Raises:
        FormatError: it cannot be read, or a field is missing, unknown or no usable number; it names file and field.
    """
    where = f"hardware file '{path}'"
    raw = read_yaml(path, "hardware file")
    if isinstance(raw, dict) and "roofline" in raw:
        return _roofline(raw, where)
    return LatencyProfile.from_dict(raw, where)


def _roofline(raw: dict[Any, Any], where: str) -> LatencyProfile:
    _check_fields(raw, ("roofline", "target"), ("draft", *OVERHEADS, *_TEXTS), where)
    device = raw["roofline"]
    _check_fields(device, _DEVICE_FIELDS[:2], _DEVICE_FIELDS[2:], f"{where}: roofline")
    numbers = {name: _number(device[name], f"{where}: roofline.{name}") for name in device if name != "forward_ms"}
    for name in ("bandwidth_share", "compute_share"):
        if numbers.setdefault(name, 1.0) > 1.0:
            raise FormatError(f"The {where}: roofline.{name} is {numbers[name]}: give a share of the peak, at most 1")
    forward_ms = _number(device.get("forward_ms", 0.0), f"{where}: roofline.forward_ms", least=0.0)
    bytes_per_ms = 1e6 * numbers["bandwidth_gb_s"] * numbers["bandwidth_share"]
    operations_per_ms = 1e9 * numbers["compute_tflop_s"] * numbers["compute_share"]
    bounds = {}  # of each model: milliseconds to read its weights, and to compute one token
    for role in ("target", "draft"):
        if raw.get(role) is not None:
            model, place = raw[role], f"{where}: {role}"
            _check_fields(model, _MODEL_FIELDS, (), place)
            parameters, size = (_number(model[name], f"{place}.{name}") for name in _MODEL_FIELDS)
            bounds[role] = parameters * size / bytes_per_ms, 2.0 * parameters / operations_per_ms
    # where reading and computing take as long, the curve bends: a count that interpolation must know
    bends = {max(1, min(_TOKENS[-1], math.floor(read / token))) for read, token in bounds.values()}
    tokens = tuple(sorted({*_TOKENS, *bends}))
    columns = {
        role: tuple(forward_ms + max(bounds[role][0], count * bounds[role][1]) for count in tokens)
        if role in bounds
        else (0.0,) * len(tokens)
        for role in ("target", "draft")
    }
    overheads = {name: _number(raw[name], f"{where}: {name}", least=0.0) for name in OVERHEADS if name in raw}
    texts = {name: str(raw[name]) for name in _TEXTS if name in raw}
    return LatencyProfile(tokens, columns["target"], columns["draft"], **overheads, **texts)  # type: ignore[arg-type]


def _check_fields(raw: Any, needed: tuple[str, ...], others: tuple[str, ...], where: str) -> None:
    if not isinstance(raw, dict):
        raise FormatError(f"The {where} is {str(raw)[:40]!r}: it must have the fields {', '.join(needed)}")
    missing = [name for name in needed if name not in raw]
    unknown = [str(name) for name in raw if name not in (*needed, *others)]
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has the unknown field {unknown[0][:40]!r}"
        raise FormatError(f"The {where} {wrong}: its fields are {', '.join((*needed, *others))}")


def _number(value: Any, where: str, least: float | None = None) -> float:
    """A number above 0, or of at least ``least``, that a device can have. YAML reads 8e9 as text: text is taken too."""
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    smallest = _SMALLEST if least is None else least
    if not smallest <= number <= _LARGEST:  # not a number is neither
        raise FormatError(f"The {where} is {str(value)[:40]!r}: give a number from {smallest:g} to {_LARGEST:g}")
    return number
