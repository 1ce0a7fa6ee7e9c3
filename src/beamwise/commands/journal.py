"""What a file of prompts has given so far, beside the output file, so that a run that was cut off can be continued."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from beamwise.decoding.errors import ConfigError
from beamwise.decoding.safe_files import parse_json

from .output import open_output
from .stopping import Interrupted


class Journal:
    """``OUT.partial``: a line that says which run it is of, then finished lines of output, each flushed as it comes.

    Args:
        out: the output file that is to be.
        settings: JSON values that a continued run must share.
        seed: of a new run; a continued one keeps its own.

    Attributes:
        lines: finished lines, without their ends.
        seed: the run's.

    Raises:
        ConfigError: the file there is of another run, or none of ours.
    """

    def __init__(self, out: str, settings: Mapping[str, Any], seed: int | None) -> None:
        self.path = Path(f"{out}.partial")
        self.lines: list[str] = []
        self.seed = seed
        self._mark = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self._file: TextIO | None = None
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        mend = "give the settings and prompts that it began with to continue it, or remove it"
        if not self.path.is_file():
            raise ConfigError(f"'{self.path}' is no regular file: remove it, or choose another --out")
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # what a kill cut off in its last line is decoded again
        lines = whole.split(b"\n")[:-1]
        try:
            header, *_ = values = [parse_json(line) for line in lines]
            if not all(isinstance(value, dict) for value in values) or header["settings"] != self._mark:
                raise ValueError("other settings or prompts")
            self.seed = None if header["seed"] is None else int(header["seed"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"'{self.path}' is not of this run ({error}): {mend}") from error
        self.lines = [line.decode() for line in lines[1:]]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))

    def add(self, line: str) -> None:
        """A finished line of output; the file is there from the first one on."""
        if self._file is None:
            header = {"beamwise": "partial output", "settings": self._mark, "seed": self.seed}
            self._file = self.path.open("a", encoding="utf-8")
            if not self.lines:
                self._file.write(json.dumps(header) + "\n")
        self._file.write(line + "\n")
        self._file.flush()
        self.lines.append(line)

    def remove(self) -> None:
        """The output is complete."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def open_journal(
    prompts: str | None, out: str | None, settings: Mapping[str, Any], seed: int | None
) -> AbstractContextManager[Journal | None]:
    """The journal of a file of prompts with an output file; other runs have none.

    Args:
        prompts: the file of prompts.
        out: the output file.
        settings: JSON values that a continued run must share; the prompts' hash is added.
        seed: of a new run.

    Raises:
        ConfigError: there is a journal of another run.
    """
    if prompts is None or out is None:
        return nullcontext(None)
    sha256 = hashlib.sha256(Path(prompts).read_bytes()).hexdigest()
    return Journal(out, {**settings, "prompts_sha256": sha256}, seed)


def finish_output(out: str | None, lines: list[str], prompts: int, signum: int | None, journal: Journal | None) -> None:
    """Write the output; or, cut off by a signal and without a journal, what there is.

    Args:
        out: the output file, or None for stdout.
        lines: of output.
        prompts: lines of a whole run.
        signum: the signal that cut the run off, if any.
        journal: of the run, if it has one; it goes once the output is there.

    Raises:
        Interrupted: lines are missing because of the signal.
    """
    stopped = len(lines) < prompts
    if journal is None or not stopped:
        with open_output(out) as file:
            file.writelines(line + "\n" for line in lines)
    if stopped and signum is not None:
        where = "put out above; a run with --out can be continued"
        if journal is not None:
            where = f"kept in '{journal.path}': give the same command again to continue"
        raise Interrupted(signum, f"stopped after {len(lines)} of {prompts} prompts, {where}")
    if journal is not None:
        journal.remove()
