"""What does a native checkpoint carry of a Megatron run, so that Megatron's files can come back?

Everything that a Megatron file has beside what every format knows: arguments, the entries of the
model and of its metadata, the optimizer's groups with all settings, the keys of its buffers, the
rules. As plain JSON; what JSON has not is tagged (:mod:`ckpttools.storage.inert_encoder`).

What belongs to ranks (random state) is not carried: after training elsewhere it would be of
another time and of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.errors import UsageError
from ckpttools.formats.megatron import carry
from ckpttools.formats.megatron.state import MegatronState
from ckpttools.layout.rules import rules_table
from ckpttools.storage.inert_encoder import encode

VERSION = 1


@dataclass(frozen=True, slots=True)
class CarriedState:
    """A Megatron run's state as another format carries it."""

    state: MegatronState

    def to_document(self) -> object:
        """Return the state as plain JSON data.

        Raises:
            UsageError: rank files differ where one must stand for all, or modules have extra
                state that nobody accepted to lose.
        """
        state = self.state
        carry.check_common(state)
        groups = state.groups
        return {
            "version": VERSION,
            "iteration_name": state.iteration_name,
            "layouts": list(state.layouts),
            "vocab_size": state.run.vocab_size,
            "stages": [list(stage) for stage in state.pipeline.counts],
            "rules": rules_table(state.rules),
            "params": {info.name: [info.location, info.requires_grad] for info in state.params},
            "entries": list(state.entries),
            "modules": _encode(state.modules, "modules"),
            "tree": _encode(_common_tree(state), "tree"),
            "groups": None
            if groups is None
            else {
                "listing": _encode(list(groups.listing), "groups"),
                "by_key": groups.by_key,
                "marked_by_key": groups.marked_by_key,
            },
            "buffer_keys": _encode(dict(state.buffer_keys), "buffer_keys"),
            "slots": list(state.slots),
            "optimizer_location": state.optimizer_location,
            "extra_states": _encode(_extra_states(state), "extra_states"),
        }


def _encode(tree: object, what: str) -> object:
    return encode(tree, where=f"megatron: {what}")


def _common_tree(state: MegatronState) -> Mapping[str, object]:
    """Return a rank file's dict without the entries that belong to ranks."""
    tree = state.trees[0, 0]
    return {key: value for key, value in tree.items() if not carry.belongs_to_ranks(key)}


def _extra_states(state: MegatronState) -> dict[str, object]:
    """Return the extra state of each module, which must be the same on every tensor rank: empty."""
    found: dict[str, object] = {}
    for (tp, name), value in sorted(state.extra_states.items()):
        if carry.is_empty(value):
            found.setdefault(name, value)
        elif carry.EXTRA_STATE in state.accept_loss:
            found[name] = None
        else:
            raise UsageError(
                f"{name}: must be empty to be carried, got extra state of tensor rank {tp}",
                hint=f"give --accept-loss {carry.EXTRA_STATE} to leave it out",
            )
    return found
