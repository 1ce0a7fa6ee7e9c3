"""The command line: ``beamwise COMMAND``. The one place that composes everything.

A command is a line in `COMMANDS`: a summary, a function, and a dataclass of options (its docstring becomes the help) of
which the function takes an instance. Both are imported only when the command is asked for, so that help is quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser, DefaultHelpFormatter

from . import __version__
from .commands.stopping import Interrupted
from .decoding.errors import BeamwiseError, ConfigError


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        summary: one line for ``beamwise --help``.
        run: ``module:function`` inside the package; takes an instance of the options. A path it returns is printed.
        options: ``module:dataclass`` inside the package; without one, ``run`` takes the remaining arguments as a list
            (for commands that parse their own).
    """

    summary: str
    run: str
    options: str | None = None


COMMANDS = {
    "generate": Command(
        "Decode a prompt, or a file of prompts.", "commands.generate:generate", "commands.generate:GenerateOptions"
    ),
    "demo": Command(
        "Decode real prompts beside transformers' own beam search.", "commands.demo:demo", "commands.demo:DemoOptions"
    ),
    "collect": Command(
        "Log traces for training a controller.", "commands.collect:collect", "commands.collect:CollectOptions"
    ),
    "profile": Command(
        "Measure forwards on this device for a controller.",
        "commands.profile:profile",
        "commands.profile:ProfileOptions",
    ),
    "train": Command("Train a width controller on traces (a LightningCLI).", "train.cli:train_main"),
    "evaluate": Command(
        "Replay traces under every width policy.",
        "commands.evaluate:evaluate",
        "commands.evaluate:EvaluateOptions",
    ),
    "simulate": Command(
        "Predict the speed of every width policy on a device, from traces.",
        "commands.simulate:simulate",
        "commands.simulate:SimulateOptions",
    ),
    "bench": Command(
        "Measure ways to decode side by side, and report.", "commands.bench:bench", "commands.bench:BenchOptions"
    ),
    "bench compare": Command("Compare two folders of bench.", "commands.bench:compare_main"),
    "distil": Command("Train a draft model for a target.", "train.distill:distil", "train.distill:DistilConfig"),
}


class _HelpFormatter(DefaultHelpFormatter):
    """jsonargparse's help without types, and with defaults only where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        switched_off = isinstance(action, ActionYesNo) and not action.default
        if not action.option_strings or switched_off or action.default in (None, argparse.SUPPRESS):
            return text
        return f"{text} [default: %(default)s]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; None takes the process's.

    Returns:
        The exit code: 0, 2 for bad input or arguments or a full disk (one line on stderr), 128 + the signal's number
        when interrupted.
    """
    # Torch's threads spin at every barrier by default; beside other busy processes each spin lasts a time slice
    # (measured: a forward of 1.9 s instead of 0.03 s on two busy cores). Sleeping at once costs a quarter of the speed
    # on an idle machine; a short spin costs neither. Must be set before torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if " ".join(given[:2]) in COMMANDS:  # a command of two words
        given[:2] = [" ".join(given[:2])]
    try:
        return _run(given)
    except ArgumentError as error:
        name = f"beamwise {given[0]}" if given and given[0] in COMMANDS else "beamwise"
        return _fail(f"{_readable(str(error))} (see {name} --help)")
    except BeamwiseError as error:
        return _fail(str(error))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _fail(f"the file name '{str(error.filename)[:60]}...' is too long: check the options")
        if error.errno not in _DISK_FULL:
            raise
        return _fail(
            f"the disk is full ({error}): what was written before is intact; make room and give the same command again"
        )
    except Interrupted as stop:
        print(f"beamwise: {stop}", file=sys.stderr)
        return 128 + stop.signum
    except KeyboardInterrupt:
        print("beamwise: interrupted", file=sys.stderr)
        return 130


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _fail(message: str) -> int:
    print(f"beamwise: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _run(given: list[str]) -> int:
    name = given[0] if given else None
    if any(argument.startswith(("--config", "-c")) for argument in given):
        from .commands.config_file import check_configs

        check_configs(given)
    if name in COMMANDS and COMMANDS[name].options is None:
        return _report(_load(COMMANDS[name].run)(given[1:]))
    parser = build_parser(name)
    if not given:
        parser.print_help()
        return 0
    config = parser.parse_args(given)
    command, values = COMMANDS[config.command], parser.instantiate(config)[config.command]
    assert command.options is not None
    options_class = _load(command.options)
    hints = get_type_hints(options_class)
    for item in dataclasses.fields(options_class):
        if values[item.name] is None and type(None) not in get_args(hints[item.name]):
            raise ConfigError(f"--{item.name.replace('_', '-')} is null: give a value, or leave the option out")
        if get_origin(hints[item.name]) is list and not isinstance(values[item.name], list):
            values[item.name] = [values[item.name]]
    options = options_class(**{item.name: values[item.name] for item in dataclasses.fields(options_class)})
    return _report(_load(command.run)(options))


def _report(result: Any) -> int:
    if isinstance(result, Path):
        print(result)
    return 0


def build_parser(chosen: str | None) -> ArgumentParser:
    """The parser of ``beamwise``; only the chosen command's options are imported and filled in."""
    parser = ArgumentParser(
        prog="beamwise",
        usage="beamwise COMMAND [options]",
        description=sys.modules["beamwise"].__doc__,
        formatter_class=_HelpFormatter,  # the subcommands' parsers take it over
        exit_on_error=False,
        allow_abbrev=False,
        version=__version__,
    )
    subcommands = parser.add_subcommands(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        options = command.options if name == chosen else None
        subparser = _command_parser(name, _load(options)) if options else ArgumentParser(exit_on_error=False)
        subcommands.add_subcommand(name, subparser, help=command.summary)
    return parser


def _command_parser(name: str, options_class: type) -> ArgumentParser:
    """One option per field: ``num_beams`` becomes ``--num-beams``, a bool ``--flag`` and ``--no-flag``.

    A list of one may be given as the one: ``--num-beams 4``.
    """
    docs = parse_docstring(options_class.__doc__ or "")
    helps = {param.arg_name: " ".join((param.description or "").split()) for param in docs.params}
    types = get_type_hints(options_class)
    parser = ArgumentParser(
        description="\n\n".join(part for part in (docs.short_description, docs.long_description) if part),
        usage=f"beamwise {name} [options]",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of options; those given after it win.")
    for item in dataclasses.fields(options_class):
        flag, text = "--" + item.name.replace("_", "-"), helps.get(item.name, "").replace("%", "%%")
        factory = item.default_factory
        default = item.default if factory is dataclasses.MISSING else factory()
        kind = types[item.name]
        if get_origin(kind) is list:
            kind = kind | get_args(kind)[0]
        if default is dataclasses.MISSING:
            parser.add_argument(flag, type=kind, required=True, help=text)
        elif kind is bool:
            parser.add_argument(flag, action=ActionYesNo(no_prefix="no-"), default=default, help=text)
        else:
            parser.add_argument(flag, type=kind, default=default, help=text)
    return parser


def _load(reference: str) -> Any:
    module, name = reference.split(":")
    return getattr(import_module(f".{module}", __package__), name)


_REWORDINGS = (
    (
        r"Does not validate against any of the Union subtypes.*?Subtypes: \[(.*)\]\s+Errors:.*Given value:",
        r"expected \1; got",
    ),
    (r"Expected an? (.*?)\. Got value:", r"expected \1; got"),
    (r"(?:typing\.)?Literal\[([^\]]*)\]", r"\1"),
    (r"<class '(\w+)'>", r"\1"),
)
"""Jsonargparse's phrases, and ours: plain names of types and choices."""


def _readable(message: str) -> str:
    """A message of the parser in the words of the command line, options as they are typed."""
    message = re.sub(r'Parser key "([^"]+)":\s*', lambda match: f"--{match[1].replace('_', '-')}: ", message)
    if "arguments are required" in message:
        message = re.sub(r"\b\w+\.(\w+)", lambda match: f"--{match[1].replace('_', '-')}", message)
    for pattern, words in _REWORDINGS:
        message = re.sub(pattern, words, message, flags=re.DOTALL)
    return message


if __name__ == "__main__":
    sys.exit(main())
