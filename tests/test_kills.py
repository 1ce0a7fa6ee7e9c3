"""SIGKILL at random moments: the resumed dataset is the uninterrupted one. ``make soak`` kills 50 times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_killed_and_resumed_runs_equal_a_whole_one() -> None:
    command = [sys.executable, "-m", "tests.fuzz.kills", "--kills", "5", "--seed", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # it forks: no threads before that
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("5 kills")
    assert "0 differ" in done.stdout
