"""Which global name does an entry of a stage's ``model`` have, and which stage does it go to?

Stage ``p`` of ``P`` holds the layers ``p * L/P`` to ``(p + 1) * L/P`` under local numbers from 0.
"""

from __future__ import annotations

import re

from ckpttools.errors import FormatError

_LAYER = re.compile(r"(decoder\.layers)\.([0-9]+)((?:\..*)?)", re.DOTALL)
_FIRST = re.compile(r"embedding(\..*)?", re.DOTALL)
_LAST = re.compile(r"(decoder\.final_layernorm|output_layer)(\..*)?", re.DOTALL)


def to_global(name: str, *, stage: int, layers: int, where: str) -> str:
    """Return the global name of an entry of ``stage``, which holds ``layers`` layers.

    >>> to_global("decoder.layers.1.mlp.linear_fc2.weight", stage=2, layers=3, where="f")
    'decoder.layers.7.mlp.linear_fc2.weight'

    Raises:
        FormatError: the local layer number is not one of the stage's.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    local = int(match[2][:10])  # a number of thousands of digits is an error of its own in Python
    if local >= layers or match[2] != str(local):
        raise FormatError(
            f"{where}: {name:.200}: the layer must be below {layers}, got {match[2]:.40}"
        )
    return f"{match[1]}.{stage * layers + local}{match[3]}"


def to_local(name: str, *, stage: int, stages: int, layers: int) -> str | None:
    """Return the name that a global entry has in the file of ``stage``; None if it isn't there.

    Entries that are neither embeddings nor layers nor the model's end are in every stage.

    >>> to_local("decoder.layers.7.mlp", stage=2, stages=3, layers=3)
    'decoder.layers.1.mlp'
    >>> to_local("embedding.word_embeddings.weight", stage=1, stages=2, layers=2) is None
    True
    """
    match = _LAYER.fullmatch(name)
    if match is not None:
        owner, local = divmod(int(match[2]), layers)
        return f"{match[1]}.{local}{match[3]}" if owner == stage else None
    if _FIRST.fullmatch(name):
        return name if stage == 0 else None
    if _LAST.fullmatch(name):
        return name if stage == stages - 1 else None
    return name
