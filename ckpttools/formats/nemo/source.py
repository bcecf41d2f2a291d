"""What does a NeMo writer make of a source? Its view, its layout, and Lightning's dict for it.

1. The view: bfloat16 weights are their masters rounded half away from zero, unless the run to come
   stores its masters. NeMo keeps remainders where the optimizer is float32 and the model bfloat16
   (``megatron_base_model.py`` of NeMo 1.23, around line 718), and a remainder fits no other
   rounding. The distributed form renames norms that are modules of their own.
2. The dict is the one that the source carries, or a new one; step, settings of parameter groups and
   the iteration are the source's in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools import derived
from ckpttools.errors import LayoutError, UsageError
from ckpttools.formats import (
    DECOUPLED,
    Carried,
    ParamGroup,
    ReadOptions,
    Target,
    decoupled_modes,
)
from ckpttools.formats.nemo.configuration import KEY as CONFIGURATION
from ckpttools.formats.nemo.configuration import new_configuration, with_mode, with_vocabulary
from ckpttools.formats.nemo.grouping import DECAY, Member, roles
from ckpttools.formats.nemo.model import Weight, build_layout, in_module_order
from ckpttools.formats.nemo.names import fused_name
from ckpttools.formats.nemo.optimizer_state import OPTIMIZER, Settings, template_of
from ckpttools.formats.nemo.settings import setting
from ckpttools.formats.nemo.state import MODEL, NemoState, adam_w_mode, restore
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import MASTER, WEIGHT, Manifest, TensorSpec

_SLOTS = frozenset({MASTER, "exp_avg", "exp_avg_sq"})
_NEEDED = ("lr", "betas", "eps", "weight_decay")
_REFUSED = ("amsgrad", "maximize")
_KEYS = ("is_expert", "lr", "bias_correction", "betas", "eps", "weight_decay")
_HINT = "take whole ones, or write --to safetensors, which holds any part"


@dataclass(frozen=True, slots=True)
class NemoSource:
    """A source as a NeMo writer takes it.

    ``view`` is the source itself where nothing of it must be seen otherwise. ``slots`` are the
    optimizer's with their dtypes, none where there are weights alone. ``left_out`` are tensors that
    the view has under another name.
    """

    view: Manifest
    state: NemoState
    layout: ShardedLayout | None
    slots: Mapping[str, str]
    specs: Mapping[tuple[str, str], TensorSpec]
    carried: tuple[str, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()


def take(source: Manifest, target: Target, *, to: str, fused: bool) -> NemoSource:
    """Return a source as a writer takes it; ``fused`` asks for the distributed form's names.

    Raises:
        UsageError: NeMo's files can't hold it.
    """
    view, renamed = _renamed(source) if fused else (source, {})
    if target.masters != "stored":
        try:
            view = derived.with_half_away_weights(view)
        except LayoutError as error:
            raise UsageError(f"--to {to}: {error}", hint="give --masters stored") from error
    own, view = len(view.tensors), derived.with_masters_of_weights(view)
    own = len(view.tensors) - own
    slots = _slots(view, to)
    state, known = _state(source)
    layout = _layout(view, state, slots)
    _check_names(view, layout, to)
    if not known and layout is not None:
        state = replace(state, tree={**state.tree, CONFIGURATION: new_configuration(layout)})
    if layout is not None:
        state = replace(state, tree=with_vocabulary(state.tree, layout))
    notes, lost = [], _lost(source, state.tree)
    if renamed:
        notes.append(
            f"names: {len(renamed)} norms are stored under the names of fused ones, as NeMo has it"
        )
    if own:
        notes.append(f"{MASTER}: {own} float32 weights of the source are their own masters")
    if slots:
        mode = _mode(source, to)
        state = replace(state, tree=with_mode(state.tree, mode))
        _check_settings(source, to)
        notes += _remarks(source, state, mode)
        state = replace(state, tree=_tree(state, view, layout, to))
    else:
        state = replace(state, tree={k: v for k, v in state.tree.items() if k != OPTIMIZER})
        if "param_groups" in source.objects:
            lost.append("optimizer: its groups and step, since no state of it is written")
    carried = [key for key in state.tree if key != MODEL]
    return NemoSource(
        view=view,
        state=state,
        layout=layout,
        slots=slots,
        specs={spec.key: spec for spec in view.tensors},
        carried=tuple(carried),
        lost=tuple(lost),
        notes=tuple(notes),
        left_out=tuple(key for key in source.index() if key[0] in renamed),
    )


def one_step(objects: Mapping[str, object], to: str) -> int:
    """Return the optimizer's step: one whole number for all parameters.

    Raises:
        UsageError: there is none, or parameters have several.
    """
    step = objects.get("step")
    if isinstance(step, Mapping):
        found = {value: name for name, value in step.items()}
        if len(found) != 1:
            shown = " and ".join(f"{value} for {name}" for value, name in list(found.items())[:2])
            raise UsageError(
                f"--to {to}: must have one step for all parameters, got {shown or 'none'}"
            )
        step = next(iter(found))
    if isinstance(step, bool) or not isinstance(step, (int, float)) or step < 0 or step % 1:
        raise UsageError(
            f"--to {to}: must have the optimizer's step as a whole number, got {step!r}"
        )
    return int(step)


def settings_by_role(
    groups: object, members: Sequence[Member], rule: str, to: str
) -> dict[str, Settings]:
    """Return the settings of each of NeMo's groups that has members.

    Raises:
        UsageError: members aren't known, or parameters of one group have different settings.
    """
    mine: dict[str, Settings] = {}
    for group in groups if isinstance(groups, tuple) else ():
        for name in (isinstance(group, ParamGroup) and group.members) or ():
            if name in mine:
                raise UsageError(f"--to {to}: {name}: must be in one parameter group, got it twice")
            mine[name] = group.settings
    found: dict[str, Settings] = {}
    for role, parted in roles(rule, members).items():
        for member in parted:
            if member.name not in mine:
                raise UsageError(
                    f"--to {to}: {member.name}: its parameter group must be known, got none"
                )
            settings = nemo_settings(mine[member.name], role)
            if found.setdefault(role, settings) != settings:
                odd = next(
                    k for k in (*settings, *found[role]) if settings.get(k) != found[role].get(k)
                )
                raise UsageError(
                    f"--to {to}: {member.name}: must have the {odd} of NeMo's group {role!r} "
                    f"(rule {rule}), {found[role].get(odd)!r}, got {settings.get(odd)!r}"
                )
    return found


def nemo_settings(settings: Settings, role: str) -> Settings:
    """Return a group's settings as NeMo has them; those of another optimizer are translated.

    NeMo names weight decay first where it sets it itself.
    """
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    if "is_expert" in plain:
        return {key: value for key, value in plain.items() if key != "step"}
    expert = plain.get("is_expert_parallel") is True
    found = {"is_expert": expert, "bias_correction": True, **plain}
    keys = _KEYS if role == DECAY else ("weight_decay", *(k for k in _KEYS if k != "weight_decay"))
    return {key: found[key] for key in keys if key in found}


def _renamed(source: Manifest) -> tuple[Manifest, dict[str, str]]:
    """Return a view under the distributed form's names, and the names that changed."""
    names = {spec.name: fused_name(spec.name) for spec in source.tensors}
    changed = {old: new for old, new in names.items() if old != new}
    if not changed:
        return source, {}
    objects = dict(source.objects)
    groups, layout = objects.get("param_groups"), objects.get("sharded_layout")
    if isinstance(groups, tuple):
        objects["param_groups"] = tuple(
            replace(g, members=tuple(changed.get(n, n) for n in g.members))
            if isinstance(g, ParamGroup) and g.members is not None
            else g
            for g in groups
        )
    if isinstance(layout, ShardedLayout):
        params = tuple(replace(p, name=changed.get(p.name, p.name)) for p in layout.params)
        objects["sharded_layout"] = replace(layout, params=params)
    tensors = tuple(replace(spec, name=names[spec.name]) for spec in source.tensors)
    return replace(source, tensors=tensors, objects=objects), changed


def _slots(view: Manifest, to: str) -> dict[str, str]:
    """Return the optimizer's slots, which all weights must have alike, or none."""
    mine: dict[str, dict[str, str]] = {}
    for spec in view.tensors:
        mine.setdefault(spec.name, {})[spec.slot] = spec.dtype.name
    first: dict[str, str] | None = None
    for name, slots in mine.items():
        if WEIGHT not in slots:
            raise UsageError(f"--to {to}: {name}: must have its weight, got none", hint=_HINT)
        others = {slot: kind for slot, kind in slots.items() if slot != WEIGHT}
        if first is None:
            first = others
        if others != first:
            raise UsageError(
                f"--to {to}: {name}: must have the optimizer's tensors that others have, "
                f"{', '.join(first) or 'none'}, got {', '.join(others) or 'none'}",
                hint=_HINT,
            )
    if first and first.keys() != _SLOTS:
        raise UsageError(
            f"--to {to}: must have {', '.join(sorted(_SLOTS))} or weights alone, got "
            f"{', '.join(sorted(first))}"
        )
    return first or {}


def _state(source: Manifest) -> tuple[NemoState, bool]:
    """Return the state that the source carries, or a new one; and whether it carries one."""
    carried = source.objects.get("carried")
    mine = carried.get("nemo") if isinstance(carried, Mapping) else None
    if isinstance(mine, NemoState):
        return mine, True
    if isinstance(mine, Carried):
        return restore(mine.to_document()), True
    iteration = source.objects.get("iteration")
    tree: dict[str, object] = {
        "epoch": 0,
        "global_step": iteration if type(iteration) is int else 0,
        "pytorch-lightning_version": "2.0.7",
        MODEL: {},
        OPTIMIZER: [],
        "lr_schedulers": [],
    }
    return NemoState(tree), False


def _layout(view: Manifest, state: NemoState, slots: Mapping[str, str]) -> ShardedLayout | None:
    """Return the source's layout, or the one that the built-in rules give for its names."""
    known = view.objects.get("sharded_layout")
    if isinstance(known, ShardedLayout):
        return known.as_zero1()
    weights = [
        Weight(spec.name, spec.stored_shape, spec.dtype.name)
        for spec in view.tensors
        if spec.slot == WEIGHT
    ]
    rows = {spec.shape[0] for spec in view.tensors if spec.padding_rows}
    options = ReadOptions(vocab_size=rows.pop() if len(rows) == 1 else None)
    try:
        return build_layout(
            {(0, 0): in_module_order(weights, options)},
            tp=1,
            pp=1,
            vpp=1,
            config=setting(state.tree, "hyper_parameters", "cfg"),
            options=options,
            slots=slots,
        )
    except LayoutError:
        return None


def _check_names(view: Manifest, layout: ShardedLayout | None, to: str) -> None:
    """Check that every parameter of the layout is there, and no other."""
    if layout is None:
        return
    names = {param.name for param in layout.params if not param.tied_to}
    if odd := sorted(names ^ {spec.name for spec in view.tensors}):
        got = "none" if odd[0] in names else "one that the source's layout lacks"
        raise UsageError(f"--to {to}: {odd[0]}: must have every weight, got {got}", hint=_HINT)


def members_of(view: Manifest, layout: ShardedLayout | None) -> list[Member]:
    """Return the parameters in module order, without tied copies."""
    if layout is not None:
        return [Member(p.name, p.shape) for p in layout.params if not p.tied_to]
    return [Member(s.name, s.shape) for s in view.tensors if s.slot == WEIGHT]


def _mode(source: Manifest, to: str) -> bool | None:
    """Return whether weight decay was decoupled, where that is known.

    Raises:
        UsageError: groups differ in it.
    """
    found = decoupled_modes(source.objects)
    if len(found) > 1:
        raise UsageError(
            f"--to {to}: {DECOUPLED} must be the same in all parameter groups, since NeMo has one "
            f"adam_w_mode, got true and false"
        )
    return next(iter(found), None)


def _check_settings(source: Manifest, to: str) -> None:
    """Check that groups have what NeMo needs, and ask for nothing that it can't do.

    Raises:
        UsageError: they don't.
    """
    groups = source.objects.get("param_groups")
    for number, group in enumerate(groups if isinstance(groups, tuple) else ()):
        if not isinstance(group, ParamGroup):
            continue
        where, settings = f"--to {to}: param_groups[{number}]", group.settings
        if missing := [name for name in _NEEDED if name not in settings]:
            raise UsageError(
                f"{where}: must have {missing[0]}, got {', '.join(settings) or 'nothing'}"
            )
        if odd := [name for name in _REFUSED if settings.get(name)]:
            raise UsageError(f"{where}: {odd[0]} must be off, since Apex can't do it, got it on")


def _tree(
    state: NemoState, view: Manifest, layout: ShardedLayout | None, to: str
) -> dict[str, object]:
    """Return the carried dict with the source's iteration, step and settings."""
    groups = view.objects.get("param_groups")
    listed = [g for g in groups if isinstance(g, ParamGroup)] if isinstance(groups, tuple) else []
    if listed and all(group.members is None for group in listed) and to == "nemo":
        settings = [nemo_settings(group.settings, DECAY) for group in listed]
    else:
        members = members_of(view, layout)
        settings = list(settings_by_role(groups, members, state.grouping, to).values())
    tree = dict(state.tree)
    if type(iteration := view.objects.get("iteration")) is int:
        tree["global_step"] = iteration
    tree[OPTIMIZER] = template_of(one_step(view.objects, to), settings)
    return tree


def _lost(source: Manifest, tree: Mapping[str, object]) -> list[str]:
    """Return a line for each thing of the source that NeMo's files have no place for."""
    found = [
        f"{key}: NeMo's files have no place for it"
        for key in _names(source, "unconverted")
        if key not in tree
    ]
    found += [f"{key}: it belongs to the source's ranks" for key in _names(source, "per_rank")]
    for key in ("opt_param_scheduler", "args", "grad_scaler"):
        if source.objects.get(key) is not None:
            found.append(f"{key}: NeMo has its own; start it from NeMo's configuration")
    carried = source.objects.get("carried")
    others = carried if isinstance(carried, Mapping) else {}
    found += [
        f"what `--to {key}` needs: NeMo's files have no place for it"
        for key in others
        if key != "nemo"
    ]
    return found


def _names(source: Manifest, key: str) -> tuple[str, ...]:
    names = source.objects.get(key)
    return tuple(str(name) for name in names) if isinstance(names, tuple) else ()


def _remarks(source: Manifest, state: NemoState, mode: bool | None) -> list[str]:
    """Return remarks on what the files can't say."""
    notes = []
    if mode is False:
        notes.append("weight decay was added to the gradient: the run needs adam_w_mode: False")
    elif mode and adam_w_mode(state.tree, ReadOptions()) is not mode:
        notes.append("weight decay was decoupled: the run needs adam_w_mode: True")
    tree, iteration = state.tree, source.objects.get("iteration")
    if tree.get("lr_schedulers") and tree.get("global_step") not in (None, iteration):
        notes.append(
            f"lr_schedulers is of step {tree['global_step']}, the rest of step {iteration}"
        )
    return notes
