"""How does a run learn that it has to go? A signal sets a flag, and the next step asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ckpttools.errors import UsageError


class Preemption:
    """Notes signals from now until :meth:`close`, in place of what they did before.

    Raises:
        UsageError: there are signals to be noted, and this isn't the main thread.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.noted = False
        self._before: dict[int, Any] = {}
        if signals and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "preemption_signals: must be set up in the main thread, got another",
                hint="give preemption_signals=()",
            )
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Let the signals do again what they did before."""
        while self._before:
            number, handler = self._before.popitem()
            if signal.getsignal(number) == self._note:  # nobody has set another one since
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.noted = True
