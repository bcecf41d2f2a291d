"""What of a rank file survives a change of topology, beside arguments and tensors?

Iteration, scheduler, parameter groups and counters mean the same on every topology. The random
number generators' state and the rerun state machine belong to ranks: they stay where tensor and
pipeline ranks stay, and are left out elsewhere, since one state copied to new ranks would give
them the same dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttools.formats.megatron.arguments import Run
from ckpttools.formats.megatron.state import MegatronState, ParamInfo

RNG = "rng_state"
OPTIMIZER = "optimizer"
_PER_RANK = {
    RNG: "start Megatron with --no-load-rng",
    "rerun_state_machine": "Megatron starts a new one",
}


def survives(key: str, value: object, state: MegatronState, run: Run) -> bool:
    """Say whether the top-level entry ``key`` of a rank file is in the target's files."""
    if key == OPTIMIZER and not state.slots:
        return False  # groups without the tensors that they are about
    if key not in _PER_RANK:
        return True
    same_ranks = (run.tp, run.pp) == (state.run.tp, state.run.pp)
    # With --data-parallel-random-init a file holds one state for each data-parallel rank.
    per_dp_rank = key == RNG and isinstance(value, list) and len(value) != 1
    return same_ranks and not (per_dp_rank and run.dp != state.run.dp)


def rewrite(key: str, value: object, state: MegatronState, stage: Sequence[ParamInfo]) -> object:
    """Return an entry as a stage's file has it: ``optimizer`` lists the groups of the stage."""
    if key != OPTIMIZER or not isinstance(value, Mapping) or state.groups is None:
        return value
    groups = state.groups.for_stage([info.group_param for info in stage])
    inner = value["optimizer"]
    return {
        key: {**inner, "param_groups": groups} if key == "optimizer" else other
        for key, other in value.items()
    }


def report(state: MegatronState, run: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a line for each entry that is carried, and for each that is not, with what to do."""
    carried, lost = [], []
    for key, value in state.trees[0, 0].items():
        if key == "model":
            continue
        if survives(key, value, state, run):
            carried.append(_CARRIED.get(key, key))
        elif key == OPTIMIZER:
            lost.append(
                "optimizer: the source has no state of it; start Megatron with --no-load-optim"
            )
        else:
            reason = "it belongs to the old ranks"
            lost.append(f"{key}: {reason}; {_PER_RANK[key]}")
    return tuple(carried), tuple(lost)


_CARRIED = {
    "args": "args, with the sizes and ranks of the new topology",
    "optimizer": "optimizer: parameter groups with their settings and step",
}
