"""What do the settings in a NeMo file say? Plain numbers, whatever holds them.

``hyper_parameters.cfg`` is a dict, or an OmegaConf container pickled as an object; a number may be
a tensor of one element (Apex's ``capturable``).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpttools.errors import FormatError
from ckpttools.storage.inert import Inert
from ckpttools.storage.torchzip import TensorRef


def setting(config: object, *path: str) -> object:
    """Return a setting by the names on the way to it; None where there is none.

    >>> setting({"cfg": {"optim": {"name": "adam"}}}, "cfg", "optim", "name")
    'adam'
    """
    node = config
    for name in path:
        node = _children(node).get(name)
    if isinstance(node, Inert) and isinstance(node.state, dict) and "_val" in node.state:
        return node.state["_val"]
    return node


def _children(node: object) -> Mapping[object, object]:
    """Return what a dict holds, or an OmegaConf DictConfig, whose content is ``_content``."""
    if isinstance(node, Inert):
        node = node.state.get("_content") if isinstance(node.state, dict) else None
    return node if isinstance(node, Mapping) else {}


def whole_number(config: object, *path: str) -> int | None:
    """Return a setting that is a whole number of at least 1; None where it is something else."""
    value = setting(config, *path)
    return value if type(value) is int and value >= 1 else None


def plain_number(value: object, where: str) -> object:
    """Return a tensor of one element as a number, and anything else as it is.

    Raises:
        FormatError: the tensor has another number of elements, or its bytes are not there.
    """
    if not isinstance(value, TensorRef):
        return value
    payload = value.storage.payload
    if value.numel != 1 or payload is None or value.dtype.name == "bfloat16":
        raise FormatError(
            f"{where}: must be a number, or a tensor of one, got a tensor of {list(value.shape)}"
        )
    array = np.frombuffer(payload, value.dtype.carrier, 1, value.offset * value.dtype.itemsize)
    number: object = array[0].item()
    return number
