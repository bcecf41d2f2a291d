"""What does a key of a ``torch.distributed.checkpoint`` name? A weight, a slot, a setting, else.

torch's state dict APIs give a model's tensors as ``<name>`` and an optimizer's as one of

======================================  ====================================================
``state.<name>.<slot>``                 a tensor or a number of a parameter
``param_groups.<i>.<setting>``          of the i-th group; ``params`` are its members
``param_groups.<name>.<setting>``       the same, flattened: of each parameter
======================================  ====================================================

A script puts both under names of its own (``model``, ``optim``, ``app.optimizer`` …), or the model
under none. Which these are shows in the keys: the optimizer is where ``param_groups`` or ``state``
are, and the model is where every parameter of the optimizer has its weight.

Source: ``torch/distributed/checkpoint/state_dict.py`` and ``_nested_dict.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError, UnsupportedError

STATE, GROUPS, MEMBERS = "state", "param_groups", "params"
_WRAPPERS = ("module.", "_orig_mod.")

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Naming:
    """How a checkpoint names things.

    ``model`` and ``optimizer`` are what stands before names, with a dot at the end unless empty.
    ``flat``: parameter groups are flattened. ``step`` is the dtype of the tensors that count
    steps, or ``object`` where they are plain numbers.
    """

    model: str = "model."
    optimizer: str = "optimizer."
    flat: bool = False
    step: str = "float32"


@dataclass(frozen=True, slots=True)
class Keys:
    """What the keys of a checkpoint name.

    ``weights`` is name → key, ``state`` (name, slot) → key; ``settings`` is (group, setting) → key,
    the group by its index or, flattened, by a parameter's name; ``others`` are all other keys.
    ``numbers`` are the parameters' names in the order of their numbers, where a file has those.
    """

    naming: Naming
    weights: Mapping[str, str]
    state: Mapping[tuple[str, str], str]
    settings: Mapping[tuple[str | int, str], str]
    others: tuple[str, ...]
    numbers: tuple[str, ...] = ()


def sort_keys(
    tensors: Collection[str], objects: Collection[str], paths: Mapping[str, Path], *, where: str
) -> Keys:
    """Say what each key names; ``paths`` are where keys stood in the nested state, if known.

    Raises:
        UnsupportedError: there are several optimizers.
        FormatError: the optimizer has state of what is no weight.
    """
    prefix = _optimizer_prefix(tensors, objects, paths, where)
    mine = [] if prefix is None else [k for k in (*tensors, *objects) if _is_under(k, prefix)]
    taken = set(mine)
    rest = [key for key in tensors if key not in taken]
    state = [k for k in mine if _after(k, prefix or "").startswith(f"{STATE}.")]
    model = _model_prefix(rest, [_state_rest(k, prefix or "") for k in state], paths)
    weights = {k.removeprefix(model): k for k in rest if k.startswith(model)}
    if not model and any(not _nested_path(key, paths) for key in rest):
        # The model lies at the top, beside dicts of other things.
        weights = {key: key for key in rest if not _nested_path(key, paths)}
    numbered = _are_numbers(state, prefix or "", weights)
    slots: dict[tuple[str, str], str] = {}
    for key in state:
        text = _state_rest(key, prefix or "")
        name = text.partition(".")[0] if numbered else _owner(text, weights)
        slot = text[len(name or "") + 1 :]
        if name is None or not slot or slot == "weight":
            raise FormatError(f"{where}: {key:.120}: must be state of a weight, got none of it")
        slots[name, slot] = key
    settings = dict(_settings(mine, prefix or "", weights, where))
    known = {*weights.values(), *taken}
    flat = any(isinstance(group, str) for group, _ in settings)
    naming = Naming(model, Naming().optimizer if prefix is None else prefix, flat)
    return Keys(
        naming, weights, slots, settings, tuple(k for k in (*tensors, *objects) if k not in known)
    )


def parts_of(key: str, paths: Mapping[str, Path]) -> Path:
    """Return the names and indices that lead to a key; the key's own parts where nobody tells.

    >>> parts_of("optim.state.a.b.step", {"optim.state.a.b.step": ("optim", "state.a.b.step")})
    ('optim', 'state', 'a', 'b', 'step')
    """
    path = _nested_path(key, paths)
    if not path:
        return tuple(key.split("."))
    marks = (f"{STATE}.", f"{GROUPS}.")
    found: list[str | int] = []
    for part in path:
        found += part.split(".") if isinstance(part, str) and part.startswith(marks) else [part]
    return tuple(found)


def _nested_path(key: str, paths: Mapping[str, Path]) -> Path:
    """Return the path of a key that stood in a dict within a dict; else nothing."""
    path = paths.get(key, ())
    return path if len(path) > 1 and ".".join(map(str, path)) == key else ()


def _after(key: str, prefix: str) -> str:
    return key[len(prefix) :]


def _is_under(key: str, prefix: str) -> bool:
    return key.startswith((f"{prefix}{STATE}.", f"{prefix}{GROUPS}."))


def _state_rest(key: str, prefix: str) -> str:
    return _after(key, f"{prefix}{STATE}.")


def _optimizer_prefix(
    tensors: Collection[str], objects: Collection[str], paths: Mapping[str, Path], where: str
) -> str | None:
    """Return what stands before the optimizer's keys; None where there is no optimizer."""
    keys = [*tensors, *objects]
    prefixes = set(_before(GROUPS, keys, paths))
    if len(prefixes) > 1:
        first, second = sorted(prefixes)[:2]
        raise UnsupportedError(
            f"{where}: must hold one optimizer, got those under {first!r:.60} and {second!r:.60}"
        )
    if prefixes:
        return prefixes.pop()
    # Without groups (a writer that drops what is no tensor) any "state" may be a module's name.
    for prefix in sorted(set(_before(STATE, list(tensors), paths)), key=len):
        mine = [key for key in tensors if key.startswith(f"{prefix}{STATE}.")]
        rest = [key for key in tensors if not key.startswith(f"{prefix}{STATE}.")]
        texts = [_state_rest(key, prefix) for key in mine]
        if any(_all_owned(texts, rest, model) for model in _candidates(rest, paths)):
            return prefix
    return None


def _before(mark: str, keys: Sequence[str], paths: Mapping[str, Path]) -> Iterator[str]:
    """Yield what stands before a mark in the keys that have it, each part with a dot."""
    for key in keys:
        parts = parts_of(key, paths)
        if mark in parts[:-1]:
            yield "".join(f"{part}." for part in parts[: parts.index(mark)])


def _model_prefix(rest: Sequence[str], state: Sequence[str], paths: Mapping[str, Path]) -> str:
    """Return what stands before the names of weights.

    It is where all state has its weight. Where there is no state: where ``model`` leads to, else
    the one thing that was saved, else nothing stands before them.
    """
    candidates = _candidates(rest, paths)
    if state:
        found = next((one for one in candidates if _all_owned(state, rest, one)), None)
        if found is not None:
            return found
    nested = _nested_prefixes(rest, paths)
    named = [one for one in nested if one.endswith("model.")]
    whole = [one for one in nested if all(key.startswith(one) for key in rest)]
    chosen = (named or whole or [""])[0]
    for wrapper in _WRAPPERS:
        if rest and all(k.startswith(chosen + wrapper) for k in rest if k.startswith(chosen)):
            chosen += wrapper
    return chosen


def _candidates(rest: Sequence[str], paths: Mapping[str, Path]) -> list[str]:
    """Return what may stand before the names of weights, the likelier first."""
    found = [*dict.fromkeys([*_nested_prefixes(rest, paths), "", "model."])]
    return [*found, *(one + wrapper for one in found for wrapper in _WRAPPERS)]


def _nested_prefixes(rest: Sequence[str], paths: Mapping[str, Path]) -> list[str]:
    """Return what leads to tensors in nested dicts, ``model`` first."""
    nested: dict[str, None] = {}
    for key in rest:
        path = _nested_path(key, paths)
        for i in range(1, len(path)):
            nested["".join(f"{part}." for part in path[:i])] = None
    return sorted(nested, key=lambda one: (not one.endswith("model."), len(one)))


def _all_owned(state: Sequence[str], rest: Sequence[str], model: str) -> bool:
    """Say whether all state is of weights, if their names are what follows ``model``."""
    weights = {key.removeprefix(model) for key in rest if key.startswith(model)}
    return all(_owner(text, weights) is not None for text in state) and bool(state)


def _owner(text: str, weights: Collection[str]) -> str | None:
    """Return the longest weight's name that ``<name>.<slot>`` begins with."""
    at = len(text)
    while (at := text.rfind(".", 0, at)) > 0:
        if text[:at] in weights:
            return text[:at]
    return None


def _are_numbers(state: Sequence[str], prefix: str, weights: Collection[str]) -> bool:
    """Say whether parameters stand under numbers, as in an optimizer's own ``state_dict``."""
    texts = [_state_rest(key, prefix) for key in state]
    return bool(texts) and all(
        text.partition(".")[0].isdecimal() and _owner(text, weights) is None for text in texts
    )


def _settings(
    keys: Sequence[str], prefix: str, weights: Collection[str], where: str
) -> Iterator[tuple[tuple[str | int, str], str]]:
    """Yield (group, setting) and key of each setting."""
    for key in keys:
        text = _after(key, prefix)
        if not text.startswith(f"{GROUPS}."):
            continue
        text = text.removeprefix(f"{GROUPS}.")
        number, _, setting = text.partition(".")
        owner = _owner(text, weights)
        if owner is not None:
            yield (owner, text[len(owner) + 1 :]), key
        elif number.isdecimal() and setting:
            yield (int(number), setting), key
        else:
            raise FormatError(f"{where}: {key:.120}: must be a setting of a weight or a group")
