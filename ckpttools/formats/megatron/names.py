"""Which global name does an entry of a model chunk have, and which chunk does it go to?

A chunk numbers its layers from 0; its embeddings lie in the first chunk, the final norm and the
output layer in the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpttools.errors import FormatError
from ckpttools.layout.pipeline import Pipeline

_LAYER = re.compile(r"(decoder\.layers)\.([0-9]+)((?:\..*)?)", re.DOTALL)
_FIRST = re.compile(r"embedding(\..*)?", re.DOTALL)
_LAST = re.compile(r"(decoder\.final_layernorm|output_layer)(\..*)?", re.DOTALL)


def count_layers(names: Iterable[str]) -> int:
    """Return how many layers a chunk with these entries has: local numbers run from 0.

    >>> count_layers(["decoder.layers.0.mlp.linear_fc2.weight", "output_layer.weight"])
    1
    """
    found = {int(match[2]) for name in names if (match := _LAYER.fullmatch(name))}
    return max(found, default=-1) + 1


def layer_of(name: str) -> int | None:
    """Return the layer number of an entry; None where it is in no layer.

    >>> layer_of("decoder.layers.7.mlp.linear_fc2.weight"), layer_of("output_layer.weight")
    (7, None)
    """
    match = _LAYER.fullmatch(name)
    return None if match is None else int(match[2])


def to_global(name: str, pipeline: Pipeline, p: int, v: int, *, where: str) -> str:
    """Return the global name of an entry of chunk ``v`` of stage ``p``.

    >>> to_global("decoder.layers.1.mlp", Pipeline(((3,), (3,), (3,))), 2, 0, where="f")
    'decoder.layers.7.mlp'

    Raises:
        FormatError: the local layer number is not one of the chunk's.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    count = pipeline.counts[p][v]
    local = int(match[2][:10])  # a number of thousands of digits is an error of its own in Python
    if local >= count or match[2] != str(local):
        raise FormatError(
            f"{where}: {name:.200}: the layer must be below {count}, got {match[2]:.40}"
        )
    return f"{match[1]}.{pipeline.first_layer(p, v) + local}{match[3]}"


def to_local(name: str, pipeline: Pipeline, p: int, v: int) -> str | None:
    """Return the name that a global entry has in chunk ``v`` of stage ``p``; None if not there.

    Entries that are neither embeddings nor layers nor the model's end are in every chunk.

    >>> to_local("decoder.layers.7.mlp", Pipeline(((3,), (3,), (3,))), 2, 0)
    'decoder.layers.1.mlp'
    >>> to_local("embedding.word_embeddings.weight", Pipeline(((2,), (2,))), 1, 0) is None
    True
    """
    match = _LAYER.fullmatch(name)
    if match is not None:
        local = int(match[2]) - pipeline.first_layer(p, v)
        inside = 0 <= local < pipeline.counts[p][v]
        return f"{match[1]}.{local}{match[3]}" if inside else None
    if _FIRST.fullmatch(name):
        return name if pipeline.is_first(p, v) else None
    if _LAST.fullmatch(name):
        return name if pipeline.is_last(p, v) else None
    return name


def param_to_local(name: str, stage: str, pipeline: Pipeline, p: int, v: int) -> str | None:
    """Return the name of a parameter in a chunk; None where its rule's ``stage`` puts it elsewhere.

    >>> param_to_local("my_head.weight", "last", Pipeline(((2,), (2,))), 0, 0) is None
    True
    """
    if stage == "first":
        return name if pipeline.is_first(p, v) else None
    if stage == "last":
        return name if pipeline.is_last(p, v) else None
    return to_local(name, pipeline, p, v)
