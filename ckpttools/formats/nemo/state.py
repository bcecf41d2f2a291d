"""What of a NeMo checkpoint is not tensors, kept for writing one again?

Lightning's dict without weights and optimizer tensors is the same in both forms, so one state
serves both. It travels through other formats as JSON; what can't (objects of NeMo's own that
contain each other, such as a pickled configuration) stays with NeMo files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.errors import FormatError, UsageError
from ckpttools.formats import ParamGroup, ReadOptions
from ckpttools.formats.nemo.configuration import KEY, MODE
from ckpttools.formats.nemo.grouping import (
    DEFAULT_RULE,
    RULES,
    Member,
    roles,
)
from ckpttools.formats.nemo.names import DEFAULT_PREFIX
from ckpttools.formats.nemo.optimizer_state import OPTIMIZER, OptimizerState, Settings
from ckpttools.formats.nemo.settings import setting
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode

VERSION = 1
MODEL = "state_dict"
EXTRA_STATE = "_extra_state"
DEFAULT_FILE = "megatron_gpt.ckpt"
_COMMON = ("epoch", "global_step", MODEL, OPTIMIZER)


@dataclass(frozen=True, slots=True, eq=False)
class NemoState:
    """Everything that a NeMo writer needs beside the tensors.

    ``tree`` is Lightning's dict with an empty model and the optimizer's settings alone; ``prefix``
    stands before every name; ``grouping`` is the rule of parameter groups; ``stacked`` says
    whether layers are stacked in the distributed form; ``extra`` are modules' extra states by name;
    ``file_name`` is that of the legacy form.
    """

    tree: Mapping[str, object]
    prefix: str = DEFAULT_PREFIX
    grouping: str = DEFAULT_RULE
    stacked: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)
    file_name: str = DEFAULT_FILE

    def to_document(self) -> object:
        """Return the state as plain JSON data, without entries that JSON can't hold.

        Raises:
            UsageError: a module's extra state can't be carried.
        """
        tree, _ = portable(self.tree)
        try:
            extra = encode(dict(self.extra), where="nemo: extra state")
        except FormatError as error:
            raise UsageError(str(error)) from error
        return {
            "version": VERSION,
            "tree": tree,
            "prefix": self.prefix,
            "grouping": self.grouping,
            "stacked": self.stacked,
            "extra": extra,
            "file_name": self.file_name,
        }


def restore(document: object) -> NemoState:
    """Return the state that a document describes.

    Raises:
        FormatError: it is none.
    """
    where = "carried: nemo"
    if not isinstance(document, Mapping) or document.get("version") != VERSION:
        raise FormatError(f"{where}: must be a document of version {VERSION}, got another")
    tree, extra = document.get("tree"), decode(document.get("extra"), where=where)
    texts = [document.get(key) for key in ("prefix", "grouping", "file_name")]
    if (
        not isinstance(tree, Mapping)
        or not isinstance(extra, dict)
        or not all(isinstance(text, str) for text in texts)
        or texts[1] not in RULES
        or "/" in str(texts[2])
    ):
        raise FormatError(f"{where}: must have tree, extra, prefix, grouping and file_name")
    return NemoState(
        {str(key): decode(value, where=f"{where}: {key}") for key, value in tree.items()},
        str(texts[0]),
        str(texts[1]),
        document.get("stacked") is True,
        {str(key): value for key, value in extra.items()},
        str(texts[2]),
    )


def portable(tree: Mapping[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the entries that JSON can hold, encoded, and the names of the others."""
    kept: dict[str, object] = {}
    lost: list[str] = []
    for key, value in tree.items():
        try:
            kept[key] = encode(value, where=key)
        except FormatError:
            lost.append(key)
    return kept, tuple(lost)


def describe(
    state: NemoState,
    optimizer: OptimizerState | None,
    layout: ShardedLayout | None,
    groups: Sequence[ParamGroup],
    options: ReadOptions,
) -> dict[str, object]:
    """Return the objects of a Manifest: what every format understands, and what NeMo needs."""
    sizes = {"tp": 1, "pp": 1, "dp": 1}
    if layout is not None:
        sizes = {"tp": layout.topology.tp, "pp": layout.topology.pp, "dp": 1}
        if layout.topology.vpp > 1:
            sizes["vpp"] = layout.topology.vpp
    objects: dict[str, object] = {"topology": sizes, "layout": (state.grouping,)}
    if layout is not None:
        stages = layout.stages()
        objects["sharded_layout"] = layout
        objects["layers"] = None if stages is None else str(stages)
    if type(state.tree.get("global_step")) is int:
        objects["iteration"] = state.tree["global_step"]
    if optimizer is not None:
        objects["step"] = optimizer.step
        objects["param_groups"] = tuple(groups)
        objects["weight_rounding"] = ("nearest_even", "half_away")
        mode = adam_w_mode(state.tree, options)
        if mode is not None:
            objects["adam_w_mode"] = mode
    objects["unconverted"] = tuple(key for key in state.tree if key not in _COMMON)
    objects["carried"] = {"nemo": state}
    return objects


def adam_w_mode(tree: Mapping[str, object], options: ReadOptions) -> bool | None:
    """Return how weight decay was done: as the user says, else as the configuration does."""
    if options.adam_w_mode is not None:
        return options.adam_w_mode
    value = setting(tree, KEY, "cfg", "optim", MODE)
    return value if isinstance(value, bool) else None


def notes_of(state: NemoState, optimizer: OptimizerState | None, options: ReadOptions) -> list[str]:
    """Return remarks on what the files don't tell, and on what other formats can't hold."""
    notes = []
    if optimizer is not None and adam_w_mode(state.tree, options) is None:
        notes.append(
            "adam_w_mode is in no file: whether weight decay was decoupled isn't known "
            "(--adam-w-mode or --l2-mode tells)"
        )
    _, lost = portable(state.tree)
    if lost:
        notes.append(
            f"{', '.join(lost)}: holds objects that only NeMo's own files can hold; other formats "
            f"don't carry it"
        )
    return notes


def param_groups(
    rule: str, members: Sequence[Member], settings: Sequence[Settings]
) -> tuple[ParamGroup, ...]:
    """Return the groups with their members by a rule; without, where it gives other groups."""
    parted = list(roles(rule, members).values())
    experts = any(group.get("is_expert") is True for group in settings)
    if experts or len(parted) != len(settings):
        return tuple(ParamGroup(group) for group in settings)
    return tuple(
        ParamGroup(group, tuple(member.name for member in mine))
        for group, mine in zip(settings, parted, strict=True)
    )
