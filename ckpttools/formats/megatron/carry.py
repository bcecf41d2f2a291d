"""What of a rank file survives a change of topology, beside arguments and tensors?

Iteration, scheduler, parameter groups and counters mean the same on every topology. The random
number generators' state and the rerun state machine belong to ranks: they stay where tensor and
pipeline ranks stay, and are left out elsewhere, since one state copied to new ranks would give
them the same dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttools.errors import UsageError
from ckpttools.formats.megatron.arguments import Run
from ckpttools.formats.megatron.groups import Settings
from ckpttools.formats.megatron.state import MegatronState, ParamInfo, optimizer_chunks
from ckpttools.formats.megatron.trees import same
from ckpttools.storage.inert import Inert, qualified_name
from ckpttools.storage.torchzip import TensorRef

RNG = "rng_state"
OPTIMIZER = "optimizer"
EXTRA_STATE = "extra_state"
_PER_RANK = {
    RNG: "start Megatron with --no-load-rng",
    "rerun_state_machine": "Megatron starts a new one",
}


def belongs_to_ranks(key: str) -> bool:
    """Say whether a top-level entry of a rank file is of its rank, not of the model."""
    return key in _PER_RANK


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


def check_common(state: MegatronState) -> None:
    """Refuse entries that differ between rank files, where ranks change and one stands for all.

    Raises:
        UsageError: an entry that no rule knows to belong to ranks differs, or some ranks lack it.
    """
    first = state.trees[0, 0]
    for rank, tree in state.trees.items():
        for key in dict.fromkeys((*first, *tree)):
            if key in (*_PER_RANK, "args", "model"):
                continue
            mine, theirs = (without_groups(t.get(key)) for t in (tree, first))
            if (key in tree) != (key in first) or not same(mine, theirs):
                raise UsageError(
                    f"{key}: must be the same in all rank files where TP or PP changes, got a "
                    f"difference between ranks (0, 0) and {rank} (tp, pp)"
                )


def without_groups(value: object) -> object:
    """Return an entry without parameter groups, which have a check of their own."""
    if isinstance(value, list):
        return [without_groups(item) for item in value]
    if isinstance(value, Mapping) and isinstance(value.get("optimizer"), Mapping):
        return {key: other for key, other in value.items() if key != "optimizer"}
    return value


def optimizer(
    value: object,
    state: MegatronState,
    run: Run,
    chunks: Sequence[Sequence[ParamInfo]],
    *,
    same_chunks: bool,
) -> object:
    """Return the ``optimizer`` entry of a stage with these model chunks.

    It has the parameter groups of each chained optimizer; the rest stays as it is. A stage that
    keeps its chunks keeps the groups that it lists, so that nothing must be known of members.
    """
    if state.groups is None or (same_chunks and not state.groups.by_key):
        return value
    known = value if isinstance(value, list) else [value]
    owners = optimizer_chunks(run)
    entries = []
    for i, owned in enumerate(owners):
        params = [info.group_param for v in owned for info in chunks[v]]
        outer = known[min(i, len(known) - 1)]
        entries.append(_with_groups(outer, state.groups.for_stage(params)))
    return entries if len(owners) > 1 else entries[0]


def _with_groups(outer: object, groups: list[Settings]) -> object:
    """Return one optimizer's entry with these groups."""
    if not isinstance(outer, Mapping):
        return outer
    inner = outer["optimizer"]
    return {
        key: {**inner, "param_groups": groups} if key == "optimizer" else other
        for key, other in outer.items()
    }


def extra_state(name: str, state: MegatronState, run: Run, tp: int) -> object:
    """Return the extra state of a module on tensor rank ``tp`` of the target.

    It belongs to the tensor rank, so it stays where tensor ranks stay. Empty ones (no fp8) mean
    the same on every rank.

    Raises:
        UsageError: it is not empty, and tensor ranks change.
    """
    if run.tp == state.run.tp:
        return state.extra_states.get((tp, name))
    values = [state.extra_states.get((t, name)) for t in range(state.run.tp)]
    if all(map(is_empty, values)):
        return values[0]
    if EXTRA_STATE in state.accept_loss:
        return None
    raise UsageError(
        f"{name}: must be empty where TP changes, got extra state of each of the "
        f"{state.run.tp} tensor ranks, which no rule joins",
        hint=f"give --accept-loss {EXTRA_STATE} to leave it out",
    )


def is_empty(value: object) -> bool:
    """Say whether an extra state holds nothing: None, a tensor or a BytesIO without content."""
    if isinstance(value, TensorRef):
        return value.numel == 0
    if isinstance(value, Inert):
        content = value.state if isinstance(value.state, tuple) else value.args
        return qualified_name(value) == "_io.BytesIO" and all(map(_no_bytes, content[:1]))
    return value is None


def _no_bytes(value: object) -> bool:
    """Say whether a pickled ``bytes`` is empty: protocol 2 writes it as a call without text."""
    if isinstance(value, Inert):
        called = qualified_name(value) in ("_codecs.encode", "__builtin__.bytes", "builtins.bytes")
        return called and not any(value.args[:1])
    return value == b""


def report(state: MegatronState, run: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a line for each entry that is carried, and for each that is not, with what to do."""
    carried, lost = [], []
    for key, value in state.trees[0, 0].items():
        if key == "model":
            continue
        if survives(key, value, state, run):
            carried.append(_CARRIED.get(key, key))
        elif key == OPTIMIZER:
            lost.append("optimizer: no state of it is written; start Megatron with --no-load-optim")
        else:
            reason = "it belongs to the old ranks"
            lost.append(f"{key}: {reason}; {_PER_RANK[key]}")
    if run.tp != state.run.tp and not all(map(is_empty, state.extra_states.values())):
        lost.append(f"{EXTRA_STATE} (fp8 scales): it belongs to the old tensor ranks")
    return tuple(carried), tuple(lost)


_CARRIED = {
    "args": "args, with the sizes and ranks of the new topology",
    "optimizer": "optimizer: parameter groups with their settings and step",
}
