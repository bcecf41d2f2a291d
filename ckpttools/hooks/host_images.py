"""What does the training thread pay for a save behind its back? One copy, into memory it has had.

Each file has an image in host memory, byte for byte as it will be on disk but for what depends on
sums of the rest, which is kept from save
to save: pages that the system has to find and clear first cost more than the copy itself. With
CUDA the memory is page-locked, so that the device copies into it directly.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ckpttools.hooks.save_plan import FilePlan, Item, SavePlan

ALIGNMENT = 4096
"""An image begins at a multiple of so many bytes: a page, for direct I/O."""


class HostImages:
    """Memory for the images of this rank's files, by their paths."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def prepare(self, plan: SavePlan) -> None:
        """Get the memory for a plan, and have the system provide all of it."""
        for file in plan.files:
            image = self._image(file)
            image.fill_(0)

    def take(self, plan: SavePlan) -> list[Tensor]:
        """Copy everything that a plan names; the values are those of this moment.

        Returns the image of each file, 1-D of bytes, whole but for late items. They are this
        object's, and stay as they are until the next call.
        """
        images = [self._image(file) for file in plan.files]
        devices: set[torch.device] = set()
        for file, image in zip(plan.files, images, strict=True):
            image[: len(file.header)] = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
            for item in file.items:
                if item.late is None:
                    _copy(item, image)
                    devices.add(item.tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return images

    def _image(self, file: FilePlan) -> Tensor:
        """Return memory of a file's size, the same as last time where it is enough."""
        memory = self._memory.get(file.path)
        if memory is None or memory.numel() < file.size_bytes:
            self._memory.pop(file.path, None)  # the old one goes before the new one comes
            size = file.size_bytes + ALIGNMENT
            if any(item.tensor.is_cuda for item in file.items):
                room = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            else:  # numpy asks for huge pages, which cost a quarter of small ones to provide
                room = torch.from_numpy(np.empty(size, np.uint8))
            start = -room.data_ptr() % ALIGNMENT
            memory = self._memory[file.path] = room[start : start + file.size_bytes]
        return memory[: file.size_bytes]


@torch.no_grad()
def _copy(item: Item, image: Tensor) -> None:
    """Copy an item's elements, in row-major order, to their place."""
    source = item.tensor.detach()
    if not source.numel():
        return
    target = image[item.offset : item.offset + item.length]
    if target.storage_offset() % source.element_size():
        target.copy_(source.contiguous().view(-1).view(torch.uint8))
        return
    typed = target.view(source.dtype).view(source.shape)
    typed.copy_(source, non_blocking=source.is_cuda)
