"""Which parameter is which number? An optimizer's own ``state_dict`` has numbers in place of names.

``--names`` gives them: a JSON list in the order of the numbers. torch's state dict APIs write names
of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpttools.errors import FormatError, UsageError
from ckpttools.formats import ReadOptions
from ckpttools.formats.dcp.keys import Keys
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import parse_json

MAX_NAMES_BYTES = 64 << 20


def with_names(keys: Keys, members: Sequence[object], options: ReadOptions, where: str) -> Keys:
    """Return the keys with parameters by name; ``members`` are the lists of the groups.

    Raises:
        UsageError: there are numbers alone, and no names were given, or they don't fit.
    """
    numbers = {name for name, _ in keys.state if name not in keys.weights}
    listed = [m for one in members if isinstance(one, list) for m in one]
    if not numbers and not any(type(member) is int for member in listed):
        return keys
    if options.names_path is None:
        raise UsageError(
            f"{where}: parameters must have names, got numbers alone",
            hint="give their names by number with --names FILE",
        )
    names = _told(Path(options.names_path), keys)
    if odd := next((n for n in sorted(numbers) if int(n) >= len(names)), None):
        raise UsageError(
            f"--names {options.names_path}: must name parameter {odd}, got {len(names)} names"
        )
    state = {(names[int(name)], slot): key for (name, slot), key in keys.state.items()}
    return replace(keys, state=state, numbers=names)


def _told(path: Path, keys: Keys) -> tuple[str, ...]:
    """Return the names in a file of the user's."""
    where = f"--names {path}"
    document = parse_json(read_small_file(path, limit_bytes=MAX_NAMES_BYTES), where)
    if not isinstance(document, list) or not all(isinstance(name, str) for name in document):
        raise UsageError(f"{where}: must be a list of names, got {document!r:.60}")
    if odd := next((name for name in document if name not in keys.weights), None):
        raise UsageError(f"{where}: must have names of weights, got {odd!r:.80}")
    if len(set(document)) != len(document):
        raise FormatError(f"{where}: must have each name once, got one twice")
    return tuple(document)
