"""SIGINT, SIGTERM and a full disk in long commands: the prompt at hand is finished, nothing is lost, a line says so."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from beamwise.cli import main
from beamwise.commands import decode
from beamwise.commands.collector import Collector
from beamwise.decoding.trace import read_blocks
from beamwise.decoding.trace_schema import read_manifest
from tests.fuzz.kills import collect_arguments, rows

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return collect_arguments(tmp_path_factory.mktemp("collect"), prompts=8)


@pytest.fixture(scope="module")
def whole(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole")
    assert main([*arguments, "--out", str(out)]) == 0
    return rows(out)


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """A command leaves the process's handlers as they were."""
    before = [signal.getsignal(one) for one in SIGNALS]
    yield
    assert [signal.getsignal(one) for one in SIGNALS] == before


def committed(out: Path) -> set[str]:
    return {str(row["prompt"]) for batch in read_blocks(out) for row in batch.to_pylist()}


def only_line(err: str) -> str:
    """The one line of stderr that is no progress bar."""
    [line] = [line for line in err.splitlines() if line.startswith("beamwise: ")]
    assert "Traceback" not in err
    return line


def signal_at(monkeypatch: pytest.MonkeyPatch, index: int, *signums: int) -> None:
    """Signals arrive while a prompt is being decoded."""
    real = Collector.decode

    def decode_one(self: Collector, number: int, prompt: Any) -> Any:
        if number == index:
            for signum in signums:
                os.kill(os.getpid(), signum)
        return real(self, number, prompt)

    monkeypatch.setattr(Collector, "decode", decode_one)


@pytest.mark.parametrize("signum", SIGNALS)
def test_collect_finishes_its_prompt_and_continues(
    signum: int,
    arguments: list[str],
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 2, signum)
        assert main([*arguments, "--out", str(tmp_path)]) == 128 + signum
    line = only_line(capsys.readouterr().err)
    assert "stopped after 3 of 8 prompts" in line
    assert "same command again to continue" in line
    assert committed(tmp_path) == {"p0", "p1", "p2"}  # the third was finished, and its half shard is there
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert rows(tmp_path) == whole


def test_a_second_signal_stops_collect_at_once(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signal_at(monkeypatch, 5, signal.SIGINT, signal.SIGTERM)
    assert main([*arguments, "--out", str(tmp_path)]) == 143
    assert "at once" in only_line(capsys.readouterr().err)
    assert committed(tmp_path) == {"p0", "p1", "p2", "p3"}


def test_a_real_signal_to_a_real_process(arguments: list[str], whole: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "beamwise.cli", *arguments, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("layers/*.parquet")) and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    _, err = process.communicate(timeout=120)
    if process.returncode != 0:  # else it was done before the signal came
        assert process.returncode == 143, err
        assert "same command again" in only_line(err)
        assert read_manifest(tmp_path).shards
        assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert rows(tmp_path) == whole


# --- generate


def generate_arguments(arguments: list[str], out: Path | None, *more: str) -> list[str]:
    kept = [arguments[arguments.index(name) + at] for name in ("--prompts", "--target", "--device") for at in (0, 1)]
    given = [] if out is None else ["--out", str(out)]
    return ["generate", *kept, "--drafter", "lookup", "--max-new-tokens", "8", "--batch-size", "2", *given, *more]


def texts(out: Path) -> list[dict[str, Any]]:
    """Lines of output without what other rows in the batch may change: costs, and the last bits of scores."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("stats", "scores")} for line in lines]


def at_block(monkeypatch: pytest.MonkeyPatch, block: int, action: Callable[[], object]) -> None:
    """Something happens after a block of decoding."""
    real, calls = decode.Meter.__call__, [0]

    def count(self: decode.Meter, record: Any) -> None:
        calls[0] += 1
        if calls[0] == block:
            action()
        real(self, record)

    monkeypatch.setattr(decode.Meter, "__call__", count)


@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("sampling", [[], ["--do-sample", "--seed", "3"]], ids=["greedy", "sampled"])
def test_generate_finishes_its_prompts_and_continues(
    signum: int,
    sampling: list[str],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(generate_arguments(arguments, tmp_path / "whole.jsonl", *sampling)) == 0
    capsys.readouterr()
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    with monkeypatch.context() as patch:
        at_block(patch, 6, lambda: os.kill(os.getpid(), signum))
        assert main(generate_arguments(arguments, out, *sampling)) == 128 + signum
    line = only_line(capsys.readouterr().err)
    assert "same command again to continue" in line
    done = len(partial.read_text().splitlines()) - 1
    assert f"stopped after {done} of 8 prompts" in line
    assert 0 < done < 8
    assert not out.exists()
    with partial.open("a") as file:
        file.write('{"id": "cut off')  # as a kill leaves it
    assert main([*generate_arguments(arguments, out, *sampling), "--max-new-tokens", "9"]) == 2
    assert "not of this run" in only_line(capsys.readouterr().err)
    assert main(generate_arguments(arguments, out, *sampling)) == 0
    assert texts(out) == texts(tmp_path / "whole.jsonl")
    assert not partial.exists()


def test_a_run_with_a_drawn_seed_keeps_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        at_block(patch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert main(generate_arguments(arguments, out, "--do-sample")) == 130
    assert main(generate_arguments(arguments, out, "--do-sample")) == 0
    assert len({line["seed"] for line in texts(out)}) == 1


def test_generate_to_stdout_puts_out_what_it_has(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_block(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert main(generate_arguments(arguments, None)) == 130
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert f"stopped after {len(lines)} of 8 prompts" in only_line(captured.err)
    assert 0 < len(lines) < 8


def test_a_second_signal_stops_generate_at_once(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_block(monkeypatch, 6, lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)])
    assert main(generate_arguments(arguments, tmp_path / "out.jsonl")) == 143
    assert "at once" in only_line(capsys.readouterr().err)


# --- a full disk


def test_collect_on_a_full_disk(
    arguments: list[str],
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = pq.write_table

    def full(table: Any, where: Any, **options: Any) -> None:
        real(table, where, **options)
        if "000001" in str(where) and "blocks" in str(where):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "disk is full" in only_line(capsys.readouterr().err)
    assert committed(tmp_path) == {"p0", "p1"}
    assert not list(tmp_path.rglob(".*.writing"))
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert rows(tmp_path) == whole


def test_collect_where_files_may_not_grow(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel's own refusal, in the midst of a Parquet file."""
    assert main([*arguments, "--out", str(tmp_path), "--limit", "2", "--prompts-per-shard", "1"]) == 0
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    capsys.readouterr()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        code = main([*arguments, "--out", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert code == 2
    assert "disk is full" in only_line(capsys.readouterr().err)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.parquet") if path in kept} == kept


def test_generate_on_a_full_disk(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(generate_arguments(arguments, tmp_path / "whole.jsonl")) == 0
    capsys.readouterr()
    from beamwise.commands.journal import Journal

    real, out = Journal.add, tmp_path / "out.jsonl"

    def full(self: Journal, line: str) -> None:
        if len(self.lines) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", full)
        assert main(generate_arguments(arguments, out)) == 2
    assert "disk is full" in only_line(capsys.readouterr().err)
    assert len((tmp_path / "out.jsonl.partial").read_text().splitlines()) == 4
    assert main(generate_arguments(arguments, out)) == 0
    assert texts(out) == texts(tmp_path / "whole.jsonl")
