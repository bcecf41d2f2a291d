"""Which of the known formats is meant, and what of a user's facts is its reader told?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpttools.errors import StorageError, UnknownFormatError, UsageError, system_errors
from ckpttools.formats import Format, ReadOptions, registry

_FILES = {"names_path": "--names", "model_path": "--model"}
"""Options that name a file, which means nothing to most formats."""


def options_of_each(formats: Sequence[Format], options: ReadOptions) -> list[ReadOptions]:
    """Return what the reader of each format is told: the files that it can use.

    Raises:
        UsageError: a file is named that none of them can use.
    """
    for key, option in _FILES.items():
        if getattr(options, key) is not None and not any(key in fmt.takes for fmt in formats):
            names = " and ".join(fmt.name for fmt in formats)
            raise UsageError(
                f"{option}: must not be given for {names}, which has no use for it, got "
                f"{getattr(options, key)}"
            )
    return [
        replace(
            options,
            names_path=options.names_path if "names_path" in fmt.takes else None,
            model_path=options.model_path if "model_path" in fmt.takes else None,
        )
        for fmt in formats
    ]


def format_names() -> tuple[str, ...]:
    """Return the names of the known formats."""
    return tuple(registry())


def formats_table() -> dict[str, str]:
    """Return a line about each format, by name."""
    return {name: fmt.about for name, fmt in registry().items()}


@system_errors()
def detect_format(path: str | Path, name: str | None = None) -> Format:
    """Return the format of ``path``, by names alone.

    Raises:
        StorageError: there is no such path.
        UnknownFormatError: no format or several recognise it, or ``name`` is none.
    """
    place = Path(path)
    known = registry()
    if name is not None and name not in known:
        raise UnknownFormatError(f"format: must be one of {', '.join(known)}, got {name!r}")
    if not place.exists():
        raise StorageError(f"{place}: must exist, got no such path")
    if name is not None:
        return known[name]
    found = [fmt for fmt in known.values() if fmt.detect(place)]
    if len(found) != 1:
        names = " and ".join(fmt.name for fmt in found) or "none"
        raise UnknownFormatError(
            f"{place}: must be of exactly one known format, got {names}",
            hint="name it with --format" if found else f"known are {', '.join(known)}",
        )
    return found[0]


def target_format(name: str) -> Format:
    """Return the format of that name, to be written.

    Raises:
        UnknownFormatError: there is none.
    """
    known = registry()
    if name not in known:
        raise UnknownFormatError(f"--to: must be one of {', '.join(known)}, got {name!r}")
    return known[name]
