"""How is a pickle read and written as data, with nothing that it names imported or run?

The one door to three modules: `inert_tree` (the objects), `inert_reader` (`loads`) and
`inert_writer` (`dumps`). ``dumps(loads(data))`` gives back the bytes that torch wrote.
"""

from __future__ import annotations

from ckpttools.storage.inert_reader import MAX_PICKLE_BYTES, Rebuild, loads
from ckpttools.storage.inert_tree import (
    MAX_DEPTH,
    ORDERED_DICT,
    UNSET,
    Inert,
    InertType,
    Rebuilt,
    Unset,
    is_global,
    new_global,
    parts,
    qualified_name,
    walk,
)
from ckpttools.storage.inert_writer import dumps

__all__ = [
    "MAX_DEPTH",
    "MAX_PICKLE_BYTES",
    "ORDERED_DICT",
    "UNSET",
    "Inert",
    "InertType",
    "Rebuild",
    "Rebuilt",
    "Unset",
    "dumps",
    "is_global",
    "loads",
    "new_global",
    "parts",
    "qualified_name",
    "walk",
]
