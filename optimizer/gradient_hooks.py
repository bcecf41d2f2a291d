"""How does an optimizer learn that a gradient is there, and still go when nobody holds it?

A parameter holds its hooks by way of C++, where Python's collector doesn't look: a hook that led
back to the parameter would keep both, with all buffers, for as long as the process lives. So a
hook knows its owner weakly, and which parameter it stands for by a number.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ref

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class GradientTaker(Protocol):
    """Whoever takes gradients as they are made."""

    def on_gradient(self, number: int) -> None:
        """Take the gradient of the parameter that was hooked as ``number``."""
        ...


def hook_gradient(param: Tensor, owner: GradientTaker, number: int) -> RemovableHandle:
    """Call ``owner.on_gradient(number)`` whenever a gradient is there, while there is an owner."""
    weak = ref(owner)

    def hook(param: Tensor) -> None:
        del param  # the owner has it
        alive = weak()
        if alive is not None:
            alive.on_gradient(number)

    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's stubs lack it
    return handle
