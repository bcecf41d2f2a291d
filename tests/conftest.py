"""What the tests need of the process that runs them: that an interrupt is one."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Heed interrupts: a shell starts a job in the background with them ignored, for good.

    The tests that interrupt a command would wait for it in vain.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
