"""Which part of a tensor does this rank hold? All of it, or the boxes that DTensor's cuts give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import UnsupportedError
from ckpttools.hooks.placements import Cut, HeldBox, held_boxes
from ckpttools.layout.box import Box
from ckpttools.optimizer.describe import dtype_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """What a rank holds of a tensor of ``shape``: ``boxes``, at their places in ``data``.

    ``is_cut`` is false for a plain tensor, which every rank that has it holds whole.
    """

    shape: tuple[int, ...]
    data: Tensor
    boxes: tuple[HeldBox, ...]
    is_cut: bool

    @property
    def dtype(self) -> str:
        """The dtype's name."""
        return dtype_name(self.data.dtype)

    def view(self, box: Box) -> Tensor:
        """Return the elements of a box that one of :attr:`boxes` covers, as a view."""
        held = next(one for one in self.boxes if one.box.covers(box))
        starts = [
            at + offset - first
            for at, offset, first in zip(
                held.local_offsets, box.offsets, held.box.offsets, strict=True
            )
        ]
        data = self.data.detach()
        for dim, (start, length) in enumerate(zip(starts, box.lengths, strict=True)):
            data = data.narrow(dim, start, length)
        return data


def is_distributed(tensor: Tensor) -> bool:
    """Say whether a tensor is a DTensor."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def as_distributed(tensor: Tensor) -> DTensor | None:
    """Return a tensor as the DTensor that it is; None for any other."""
    if not is_distributed(tensor):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local_of(tensor: Tensor, where: str) -> LocalTensor:
    """Return this rank's part of a tensor.

    Raises:
        UnsupportedError: it is of a kind whose elements can't be told apart here.
    """
    if nn.parameter.is_lazy(tensor):
        raise UnsupportedError(f"{where}: must have a shape, got one that is not initialised")
    distributed = as_distributed(tensor)
    data = tensor.detach() if distributed is None else local_data(distributed)
    _check(data, where)
    shape = tuple(tensor.shape)
    if distributed is None:
        whole = HeldBox(Box.whole(shape), (0,) * len(shape))
        boxes = (whole,) if whole.box.numel else ()
        return LocalTensor(shape, data, boxes, is_cut=False)
    cuts = _cuts(distributed, where)
    held = () if cuts is None else held_boxes(shape, cuts, data.shape, where=where)
    return LocalTensor(shape, data, held, is_cut=True)


def local_data(tensor: DTensor) -> Tensor:
    """Return this rank's part of a DTensor: the memory itself, without autograd."""
    with torch.no_grad():
        return tensor.to_local()


def _check(data: Tensor, where: str) -> None:
    if type(data) not in (Tensor, nn.Parameter, nn.Buffer) or data.layout != torch.strided:
        raise UnsupportedError(
            f"{where}: must be a plain dense tensor or a DTensor of such, got "
            f"{type(data).__name__} in {data.layout}"
        )
    if data.device.type == "meta":
        raise UnsupportedError(f"{where}: must have elements, got a tensor on meta")
    if dtype_name(data.dtype) not in BY_NAME:
        raise UnsupportedError(
            f"{where}: dtype must be one of {', '.join(BY_NAME)}, got {dtype_name(data.dtype)}"
        )


def _cuts(tensor: DTensor, where: str) -> list[Cut] | None:
    """Return how a DTensor is cut on its way to this rank; None where the rank has no part."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    cuts = []
    for at, parts, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise UnsupportedError(
                f"{where}: placements must be Shard or Replicate, got {placement}"
            )
        factor = int(getattr(placement, "split_factor", 1))
        cuts.append(Cut(dim % max(1, tensor.ndim), at, parts, factor))
    return cuts
