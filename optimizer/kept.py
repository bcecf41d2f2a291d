"""In which forms does a rank keep the numbers of one slot of one piece? Behind one interface.

The update works on fp32. A form that *is* fp32 is updated in place; every other one is read to
fp32 scratch before and written back after.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ckpttools.optimizer.remainders import join_master, split_master
from ckpttools.optimizer.scaled import decode, encode


class Kept(Protocol):
    """The numbers of one slot of one piece, 1-D."""

    @property
    def in_place(self) -> Tensor | None:
        """The numbers as fp32 memory that may be written, where they are kept so."""
        ...

    def read(self, values: Tensor) -> None:
        """Write the numbers to ``values``, fp32."""
        ...

    def write(self, values: Tensor) -> None:
        """Keep the numbers in ``values``, fp32."""
        ...

    def publish(self) -> None:
        """Round a master that was updated to the parameter."""
        ...

    def part(self, low: int, high: int) -> Kept:
        """Return elements ``low`` to ``high``."""
        ...


class Plain:
    """fp32 memory: moments, masters, or an fp32 parameter that is its own master.

    ``weight`` is the 16-bit parameter of a master, which is rounded to nearest even; None where
    there is none.
    """

    def __init__(self, memory: Tensor, weight: Tensor | None = None) -> None:
        self.memory = memory
        self.weight = weight

    @property
    def in_place(self) -> Tensor | None:
        """The memory."""
        return self.memory

    def read(self, values: Tensor) -> None:
        """Copy."""
        values.copy_(self.memory)

    def write(self, values: Tensor) -> None:
        """Copy."""
        self.memory.copy_(values)

    def publish(self) -> None:
        """Round to the parameter, if there is one."""
        if self.weight is not None:
            self.weight.copy_(self.memory)

    def part(self, low: int, high: int) -> Plain:
        """Return a part."""
        return Plain(self.memory[low:high], None if self.weight is None else self.weight[low:high])


class Widened:
    """A 16-bit parameter that is its own master: every step rounds it to nearest even."""

    in_place = None

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def read(self, values: Tensor) -> None:
        """Widen."""
        values.copy_(self.weight)

    def write(self, values: Tensor) -> None:
        """Round."""
        self.weight.copy_(values)

    def publish(self) -> None:
        """Do nothing: the parameter is what was written."""

    def part(self, low: int, high: int) -> Widened:
        """Return a part."""
        return Widened(self.weight[low:high])


class WithRemainder:
    """A master kept as a bfloat16 parameter and an int16 remainder; exact."""

    in_place = None

    def __init__(self, weight: Tensor, remainder: Tensor) -> None:
        self.weight = weight
        self.remainder = remainder

    def read(self, values: Tensor) -> None:
        """Join."""
        join_master(self.weight, self.remainder, values)

    def write(self, values: Tensor) -> None:
        """Split: sets the parameter too."""
        split_master(values, self.weight, self.remainder)

    def publish(self) -> None:
        """Do nothing: the parameter was set with the remainder."""

    def part(self, low: int, high: int) -> WithRemainder:
        """Return a part."""
        return WithRemainder(self.weight[low:high], self.remainder[low:high])


class Scaled:
    """16-bit numbers with one scale; ``weight`` is the parameter of a master.

    The parameter is rounded from what is kept, so that a run which goes on from a checkpoint has
    the parameters that the one before it had.
    """

    in_place = None

    def __init__(self, memory: Tensor, scale: Tensor, weight: Tensor | None = None) -> None:
        self.memory = memory
        self.scale = scale
        self.weight = weight

    def read(self, values: Tensor) -> None:
        """Multiply with the scale."""
        decode(self.memory, self.scale, values)

    def write(self, values: Tensor) -> None:
        """Find the scale and divide by it."""
        encode(values, self.memory, self.scale)

    def publish(self) -> None:
        """Round to the parameter, if there is one."""
        if self.weight is not None:
            self.weight.copy_(self.memory.float().mul_(self.scale))

    def part(self, low: int, high: int) -> Scaled:
        """Return all of it: one scale can't be found for a part.

        Raises:
            ValueError: a part is asked for.
        """
        if (low, high) != (0, self.memory.numel()):
            raise ValueError(
                f"scaled state: must be taken whole, got elements {low} to {high} of "
                f"{self.memory.numel()}"
            )
        return self
