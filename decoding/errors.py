"""Typed errors. Each message names the input that is wrong and how to mend it."""

from __future__ import annotations


class BeamwiseError(Exception):
    """Base of every error that Beamwise raises for bad input; the command line prints it and exits with code 2."""


class ConfigError(BeamwiseError, ValueError):
    """A setting has a value that cannot work."""


class UnsupportedError(BeamwiseError, ValueError):
    """A feature of transformers or of a model that Beamwise does not decode."""


class ModelError(BeamwiseError, ValueError):
    """A model or tokenizer cannot be found, loaded or paired."""


class InputError(BeamwiseError, ValueError):
    """A prompt or a prompts file that cannot be decoded."""


class NumericalError(BeamwiseError, ArithmeticError):
    """The model returned NaN logits."""


class FormatError(BeamwiseError, ValueError):
    """A file on disk (traces, controller, draft) is damaged, foreign or of another version."""
