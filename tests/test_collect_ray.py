"""`beamwise collect --executor ray`: the same traces as in one process, whoever dies in between.

Ray runs in processes of its own here: where it breaks, it ends its process, and so would end the tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beamwise.cli import main
from beamwise.decoding.trace_schema import MANIFEST, read_manifest
from tests.fuzz.kills import collect_arguments, rows

pytest.importorskip("ray.data", reason="Ray is not installed: pip install 'beamwise[ray]'")
pytestmark = pytest.mark.xdist_group("ray")  # one cluster at a time

PROMPTS = 60
"""Two to a shard: enough that there is something left to do when somebody was killed."""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return collect_arguments(tmp_path_factory.mktemp("inputs"), PROMPTS)


@pytest.fixture(scope="module")
def whole(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("process") / "traces"
    assert main([*arguments, "--out", str(out)]) == 0
    return rows(out)


def start(arguments: list[str], out: Path, actors: int) -> subprocess.Popen[bytes]:
    options = ["--out", str(out), "--executor", "ray", "--actors", str(actors), "--cpus-per-actor", "0.5"]
    return subprocess.Popen([sys.executable, "-m", "beamwise.cli", *arguments, *options])


def wait_for(happens: Callable[[], Any], process: subprocess.Popen[bytes], limit_s: float = 120.0) -> Any:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := happens():
            return found
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.02)
    raise AssertionError("it never happened")


def actors_of(driver: int) -> list[int]:
    """Processes of our actors below a driver, from /proc: Ray gives a worker the name of what it runs."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            names[int(folder.name)] = (folder / "cmdline").read_bytes()
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile

    def below(pid: int) -> bool:
        return pid == driver or (pid in parents and below(parents[pid]))

    return [pid for pid, name in names.items() if name.startswith(b"ray::MapWorker") and below(pid)]


def shards(out: Path) -> int:
    return len(read_manifest(out).shards) if (out / MANIFEST).exists() else 0


def test_a_killed_actor_and_a_killed_driver_leave_the_dataset_of_one_process(
    arguments: list[str], whole: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "traces"
    driver = start(arguments, out, actors=2)
    try:
        victim = wait_for(lambda: shards(out) and actors_of(driver.pid), driver)[0]
        os.kill(victim, signal.SIGKILL)
        before = shards(out)
        wait_for(lambda: shards(out) > before, driver)
    finally:
        driver.kill()
        driver.wait()
    assert shards(out) < PROMPTS // 2, "the driver was killed too late to show anything"
    assert start(arguments, out, actors=1).wait(timeout=300) == 0
    assert rows(out) == whole


def test_a_killed_actor_is_replaced(arguments: list[str], whole: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "traces"
    driver = start(arguments, out, actors=1)
    victim = wait_for(lambda: actors_of(driver.pid), driver)[0]
    wait_for(lambda: shards(out), driver)
    os.kill(victim, signal.SIGKILL)
    assert driver.wait(timeout=300) == 0
    assert rows(out) == whole


def test_a_signal_ends_it_well_and_one_process_can_go_on(
    arguments: list[str], whole: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "traces"
    driver = start(arguments, out, actors=1)
    wait_for(lambda: shards(out), driver)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(timeout=120) == 128 + signal.SIGINT
    assert 0 < shards(out) < PROMPTS // 2
    assert main([*arguments, "--out", str(out)]) == 0
    assert rows(out) == whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "NOWHERE"], "Cannot load model"),
        (["--cpus-per-actor", "4096"], "no room for an actor of 4096 CPU"),
        (["--address", "127.0.0.1:1"], "no Ray cluster answers there"),
        (["--actors", "-1"], "at least 0"),
    ],
)
def test_bad_input_is_one_line(more: list[str], message: str, arguments: list[str], tmp_path: Path) -> None:
    more = [str(tmp_path) if word == "NOWHERE" else word for word in more]
    command = [sys.executable, "-m", "beamwise.cli", *arguments, "--out", str(tmp_path / "traces")]
    done = subprocess.run(
        [*command, "--executor", "ray", *more], capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("beamwise: ")]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert message in lines[0]
