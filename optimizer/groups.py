"""Over which ranks does an optimizer shard, and which ranks share its work in other ways?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.collectives import Collectives, SingleRank, collectives_for

Axis = Literal["dp", "tp", "pp", "redundant"]


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The process groups that this rank is in.

    ``dp``: the state is sharded over it; ``None`` is the default group, or a process alone.
    ``tp`` and ``pp``: the ranks that hold the other parts of the model; ``None`` is no other.
    ``redundant``: ranks that hold the same slices, over which gradients are summed as well;
    ``None`` is no other.

    Raises:
        OptimizerError: this rank isn't in a group, or two groups share more ranks than this one.
    """

    dp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    redundant: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for axis in _AXES:
            self._check_member(axis)
        taken: dict[int, Axis] = {}
        for axis in _AXES:
            ranks = self.ranks(axis)
            for rank in ranks if len(ranks) > 1 else ():
                if rank in taken and rank != dist.get_rank():
                    raise OptimizerError(
                        f"{axis} group: must share this rank alone with the {taken[rank]} group, "
                        f"got rank {rank} in both"
                    )
                taken[rank] = axis

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        dp: str = "dp",
        tp: str = "tp",
        pp: str = "pp",
        redundant: str = "redundant",
    ) -> ParallelGroups:
        """Take the groups from the dimensions of a mesh by their names.

        Dimensions that the mesh lacks have size 1, but for ``dp``.

        Raises:
            OptimizerError: the mesh lacks the dimension ``dp``, or has one besides these.
        """
        names = mesh.mesh_dim_names or ()
        known = {"dp": dp, "tp": tp, "pp": pp, "redundant": redundant}
        if dp not in names:
            raise OptimizerError(f"device mesh: must have a dimension {dp}, got {list(names)}")
        for name in names:
            if name not in known.values() and mesh.size(names.index(name)) > 1:
                raise OptimizerError(
                    f"device mesh: its dimensions must be {', '.join(known.values())}, got {name}"
                )
        return cls(**{axis: mesh.get_group(n) for axis, n in known.items() if n in names})

    def ranks(self, axis: Axis) -> tuple[int, ...]:
        """Return the global ranks of one group in its order; this rank alone where it is None."""
        group = self._group(axis)
        if group is None:
            return (dist.get_rank() if _initialized() else 0,)
        return tuple(dist.get_process_group_ranks(group))

    def size(self, axis: Axis) -> int:
        """Return the number of ranks in one group."""
        return len(self.ranks(axis))

    def rank(self, axis: Axis) -> int:
        """Return this rank's place in one group."""
        group = self._group(axis)
        return 0 if group is None else dist.get_rank(group)

    def collectives(self, axis: Axis, device: torch.device) -> Collectives:
        """Return the collectives of one group for buffers on ``device``.

        Raises:
            OptimizerError: the group's backend can't serve the device.
        """
        group = self._group(axis)
        return SingleRank() if group is None else collectives_for(group, device)

    def _group(self, axis: Axis) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup | None = getattr(self, axis)
        return dist.group.WORLD if group is None and axis == "dp" and _initialized() else group

    def _check_member(self, axis: Axis) -> None:
        group: object = getattr(self, axis)
        if group is None:
            return
        # torch hands a rank that it leaves out a number in place of a group.
        if not isinstance(group, dist.ProcessGroup):
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                raise OptimizerError(
                    f"{axis} group: this rank must be in it, got one without rank {dist.get_rank()}"
                )
            raise OptimizerError(f"{axis} group: must be a process group, got {group!r}")
        if dist.get_rank(group) < 0:
            raise OptimizerError(
                f"{axis} group: this rank must be in it, got one without rank {dist.get_rank()}"
            )


_AXES: tuple[Axis, ...] = get_args(Axis)


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
