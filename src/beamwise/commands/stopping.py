"""Long commands end well: the first SIGINT or SIGTERM lets them finish what they are at, the second stops at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupted(BaseException):
    """A signal ended the command; the process exits with 128 + its number.

    Args:
        signum: the signal.
        message: one line for the user: how far it came, and how to go on.
    """

    def __init__(self, signum: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.signum = signum


class StopRequests:
    """While entered, the first signal sets `signum` and no more; the second raises `Interrupted`; a third kills.

    Attributes:
        signum: the signal that came first, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> StopRequests:
        self._previous = {signum: signal.signal(signum, self._take) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            return
        for one in self._previous:
            signal.signal(one, signal.SIG_DFL)
        raise Interrupted(signum, "stopped at once by a second signal; what was written before is intact")
