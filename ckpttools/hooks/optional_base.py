"""How does a class of ours become a callback of a library that need not be installed? When made.

The library is imported when the first instance is made, and its base class is put behind ours:
what ours doesn't have comes from there.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpttools.errors import UsageError

_MADE: dict[type, type] = {}


def based(own: type, find_base: Callable[[], type], name: str) -> type:
    """Return a subclass of ``own`` and of the library's base class; ``name`` is the library's.

    Raises:
        UsageError: the library isn't installed.
    """
    if own in _MADE:
        return _MADE[own]
    try:
        base = find_base()
    except ImportError as error:
        raise UsageError(
            f"{name}: must be installed, got {error}",
            hint='pip install "ckpttools[ecosystem]"',
        ) from error
    names = {"__module__": own.__module__, "__doc__": own.__doc__}
    _MADE[own] = type(own.__name__, (own, base), names)
    return _MADE[own]
