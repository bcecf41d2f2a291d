"""Which parameter is which number? Apex numbers them in the order of its groups, without names.

Names come from the first of these that has them; sizes are never guessed by:

1. the names beside files that ckpttools wrote (``ckpttools.json``);
2. ``param_names`` of the groups, which torch keeps where a run gave its parameters with names;
3. ``--names``: JSON with a list in the order of the numbers, a list for each group, or an object
   from number to name;
4. the order of the model's weights, where there is exactly one group and every weight fits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpttools.errors import FormatError, UsageError
from ckpttools.formats.apex.model import Model, StoredTensor
from ckpttools.formats.apex.saved import SavedState
from ckpttools.formats.apex.sidecar import FORMAT, Sidecar
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import parse_json

MAX_NAMES_BYTES = 64 << 20

Fits = Callable[[int, StoredTensor], bool]
"""Says whether a weight can be the parameter with a number."""


def names_of(
    saved: SavedState,
    sidecar: Sidecar | None,
    names_path: str | None,
    model: Model | None,
    fits: Fits,
) -> tuple[str, ...]:
    """Return the name of each number.

    Raises:
        UsageError: no source tells them, or ``--names`` contradicts the files.
        FormatError: what the files tell doesn't fit.
    """
    told = None if names_path is None else _told(Path(names_path), saved)
    known = _known(saved, sidecar)
    if known is not None and told is not None and known != told:
        odd = next(i for i, (a, b) in enumerate(zip(known, told, strict=True)) if a != b)
        raise UsageError(
            f"--names: must agree with the names in the files, got {told[odd]!r:.80} where "
            f"parameter {odd} is {known[odd]!r:.80}"
        )
    names = known or told or _by_order(saved, model, fits)
    if names is None:
        raise UsageError(
            f"{saved.where}: parameters must have names, got numbers alone in "
            f"{len(saved.groups)} groups",
            hint="give their names by number with --names FILE",
        )
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"{saved.where}: a name must be one parameter's, got {twice!r:.80} twice")
    return names


def _known(saved: SavedState, sidecar: Sidecar | None) -> tuple[str, ...] | None:
    """Return the names that the files themselves tell."""
    if sidecar is not None:
        if len(sidecar.names) != saved.count:
            raise FormatError(
                f"{sidecar.where}: must name the {saved.count} parameters of {saved.where}, got "
                f"{len(sidecar.names)} names"
            )
        return sidecar.names
    lists = [group.names for group in saved.groups]
    if all(names is not None for names in lists):
        return tuple(name for names in lists if names is not None for name in names)
    return None


def _told(path: Path, saved: SavedState) -> tuple[str, ...]:
    """Return the names in a file of the user's."""
    where = f"--names {path}"
    document = parse_json(read_small_file(path, limit_bytes=MAX_NAMES_BYTES), where)
    if isinstance(document, dict) and document.get("format") == FORMAT:
        document = document.get("names")
    if isinstance(document, dict):
        numbers = [str(i) for i in range(saved.count)]
        if set(document) != set(numbers):
            odd = min(set(document) ^ set(numbers))
            raise UsageError(
                f"{where}: must have a name for each number below {saved.count}, got "
                f"{'none' if odd in numbers else 'one'} for {odd!r:.40}"
            )
        document = [document[number] for number in numbers]
    elif isinstance(document, list) and document and all(isinstance(n, list) for n in document):
        sizes = [len(group.indices) for group in saved.groups]
        if [len(names) for names in document] != sizes:
            raise UsageError(
                f"{where}: must have lists of {sizes} names for the groups, got "
                f"{[len(names) for names in document]}"
            )
        document = [name for names in document for name in names]
    if not isinstance(document, list) or not all(isinstance(name, str) for name in document):
        raise UsageError(f"{where}: must be a list or an object of names, got {document!r:.60}")
    if len(document) != saved.count:
        raise UsageError(f"{where}: must name {saved.count} parameters, got {len(document)} names")
    return tuple(document)


def _by_order(saved: SavedState, model: Model | None, fits: Fits) -> tuple[str, ...] | None:
    """Return the names of a model's weights, where they can only be the parameters in order."""
    if model is None or len(saved.groups) != 1:
        return None
    weights = model.distinct()
    if len(weights) != saved.count or not all(map(fits, range(saved.count), weights.values())):
        return None
    return tuple(weights)
