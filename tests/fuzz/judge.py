"""Runs hostile inputs one by one and says what became of each."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from beamwise.decoding.errors import BeamwiseError

from .surfaces import SURFACES, Refused

HANG_S = 10.0
_EXECUTION = frozenset({"os.system", "os.fork", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class"})
_seen: list[str] = []
_watching = [False]


class Hang(BaseException):
    """An input took more than `HANG_S` seconds."""


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watching[0] and event in _EXECUTION:
        _seen.append(f"{event}{arguments[:2]!r}"[:200])
        raise RuntimeError(f"{event} is not allowed here")  # and does not happen


sys.addaudithook(_watch)  # cannot be taken away again; it looks only while an input is read


@dataclass
class Tally:
    """What became of the inputs of a surface.

    Attributes:
        counts: inputs by outcome: accepted, refused (by a typed error), traceback, hang, execution.
        slowest_s: seconds of the slowest input.
        bad: the seed and story of each input of the last three kinds.
    """

    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    bad: list[str] = field(default_factory=list)


def fuzz(name: str, first: int, count: int, seed: int, work: Path) -> Tally:
    """Read ``count`` hostile inputs of a surface; input ``n`` depends on (seed, surface, n) alone.

    Args:
        name: of the surface.
        first: number of the first input.
        count: of inputs.
        seed: of all.
        work: an empty folder.
    """
    (work / "base").mkdir(parents=True)
    surface, tally = SURFACES[name](work / "base"), Tally()
    for number in range(first, first + count):
        rng = random.Random(f"{seed}/{name}/{number}")
        place = work / "input"
        place.mkdir()
        read = surface.attack(rng, place)
        start = time.perf_counter()
        outcome, story = judge(read, place)
        tally.slowest_s = max(tally.slowest_s, time.perf_counter() - start)
        tally.counts[outcome] += 1
        if outcome not in ("accepted", "refused"):
            tally.bad.append(f"{name} {number}: {outcome}: {story}")
        shutil.rmtree(place)
    return tally


def judge(read: Callable[[], object], place: Path) -> tuple[str, str]:
    """Call a reader; its outcome, and the story where it is a bad one."""
    _seen.clear()
    previous = signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    _watching[0] = True
    try:
        read()
        outcome = "accepted", ""
    except (BeamwiseError, Refused):
        outcome = "refused", ""
    except Hang:
        outcome = "hang", traceback.format_exc()
    except BaseException:  # whatever it is, it would be a traceback
        outcome = "traceback", traceback.format_exc()
    finally:
        _watching[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if _seen or (place / "sentinel").exists() or Path("sentinel").exists():
        return "execution", "; ".join(_seen) or "the sentinel file is there"
    return outcome


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise Hang
