"""What does this rank need of a checkpoint, and what becomes of it? Weights and state, matched.

1. A model's tensors are found by any of their names; the optimizer's state by name and key.
2. A parameter that the checkpoint's optimizer had, and has no state of, was never trained: here it
   has none afterwards either. One that the checkpoint's optimizer didn't have is missing.
3. New state is made in memory of its own, as the optimizer would make it, and filled there. Only
   :meth:`Wanted.install` touches the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ckpttools.hooks.capture import STEP, parameter_names
from ckpttools.hooks.differences import Differences
from ckpttools.hooks.expected_state import State, expected_states, like_distributed
from ckpttools.hooks.local_tensors import LocalTensor, as_distributed, local_data, local_of
from ckpttools.hooks.model_state import ModelTensor, model_tensors
from ckpttools.hooks.reading import Want
from ckpttools.hooks.saved_groups import Taken, install, saved_groups, taken_settings
from ckpttools.manifest import MASTER, WEIGHT, Manifest, TensorSpec

_NARROW = frozenset({"bfloat16", "float16"})


class Wanted:
    """The tensors that a rank reads, and what it does with them.

    ``reads`` have fresh memory; ``keys`` are the (name, slot) that are taken.
    """

    def __init__(
        self,
        manifest: Manifest,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        differences: Differences,
    ) -> None:
        self.manifest = manifest
        self.optimizer = optimizer
        self.differences = differences
        self.model = model_tensors(model)
        self.reads: list[Want] = []
        self.keys: set[tuple[str, str]] = set()
        self._index = manifest.index()
        self._installs: list[Callable[[], object]] = []
        self._states: dict[Tensor, dict[str, object]] = {}
        self._groups: list[Taken] = []
        for one in self.model:
            self._want_weight(one)
        if optimizer is not None:
            self._want_state(optimizer)

    @property
    def names(self) -> set[str]:
        """All names of the model's tensors."""
        return {name for one in self.model for name in one.names}

    def check_unused(self, known: frozenset[str]) -> tuple[str, ...]:
        """Note what of the checkpoint no rank takes; ``known`` are the names of all ranks.

        Returns the tensors of this rank's own names, and those of no rank.
        """
        mine, unused = self.names, []
        weight_of = {name: one for one in self.model for name in one.names}
        for spec in self.manifest.tensors:
            if spec.key in self.keys or (spec.name in known and spec.name not in mine):
                continue
            tied = weight_of.get(spec.name)
            if tied is not None and any((name, spec.slot) in self.keys for name in tied.names):
                continue  # stored under two names, and read under the other
            if spec.slot == MASTER and tied is not None and self._is_weight(spec.name):
                continue
            unused.append(str(spec))
            if spec.slot == WEIGHT or self.optimizer is not None:
                self.differences.unused(spec.name, spec.slot)
        return tuple(unused)

    @torch.no_grad()
    def install(self) -> None:
        """Take everything over; nothing here can fail for want of memory or data."""
        for put in self._installs:
            put()
        if self.optimizer is not None:
            for param, state in self._states.items():
                if state:
                    self.optimizer.state[param] = state
                else:
                    self.optimizer.state.pop(param, None)
        install(self._groups)

    # ---- the model -----------------------------------------------------------------------

    def _want_weight(self, one: ModelTensor) -> None:
        local = local_of(one.tensor, one.name)
        name = next((n for n in one.names if (n, WEIGHT) in self._index), None)
        if name is None:
            self.differences.missing(one.name, WEIGHT)
            return
        slot = WEIGHT
        stored = self.manifest.tensors[self._index[name, WEIGHT]].dtype.name
        if local.dtype == "float32" and stored in _NARROW and (name, MASTER) in self._index:
            slot = MASTER  # what the stored weight is the rounding of
            self.keys.add((name, WEIGHT))
            self.differences.notes.append(f"{name}: the float32 weight is the checkpoint's master")
        fresh = self._read(name, slot, local, one.name)
        if fresh is not None:
            self._installs.append(partial(local.data.copy_, fresh))

    def _is_weight(self, name: str) -> bool:
        """Say whether a parameter's master is its weight: both are stored in float32."""
        index = self._index.get((name, WEIGHT))
        return index is not None and self.manifest.tensors[index].dtype.name == "float32"

    def _read(
        self, name: str, slot: str, local: LocalTensor, shown: str, *, into: bool = False
    ) -> Tensor | None:
        """Want a tensor in the shape of a local one; return the memory that it comes to.

        ``into``: that may be the local one itself.
        """
        tensor = self._index[name, slot]
        spec = self.manifest.tensors[tensor]
        if local.shape not in (spec.shape, spec.stored_shape):
            text = f"shape must be {local.shape} as in this run, got {spec.shape}"
            self.differences.other(shown, slot, text)
            return None
        if spec.dtype.name != local.dtype:
            text = f"dtype must be {local.dtype} as in this run, got {spec.dtype}"
            self.differences.other(shown, slot, text)
            return None
        self.keys.add(spec.key)
        data = local.data
        if not (into and data.device.type == "cpu" and data.is_contiguous()):
            data = torch.empty(tuple(data.shape), dtype=data.dtype)
        self.reads.append(Want(tensor, local.boxes, data))
        return data

    # ---- the optimizer -------------------------------------------------------------------

    def _want_state(self, optimizer: torch.optim.Optimizer) -> None:
        names = parameter_names(self.model, optimizer)
        expected = expected_states(optimizer)
        members = {m for group in saved_groups(self.manifest) for m in group.members or ()}
        stored: dict[str, list[str]] = {}
        for spec in self.manifest.tensors:
            if spec.slot != WEIGHT:
                stored.setdefault(spec.name, []).append(spec.slot)
        values = self.manifest.objects.get("state_values")
        plain = values if isinstance(values, Mapping) else {}
        by_param: dict[int, str] = {}
        for one in self.model:
            if id(one.tensor) not in names:
                continue
            has = (n for n in one.names if n in stored or n in plain or n in members)
            name = by_param[id(one.tensor)] = next(has, one.name)
            slots = [slot for slot in stored.get(name, ()) if not self._is_alias(name, slot)]
            state = expected[id(one.tensor)]
            if slots or name in plain:
                self._want_entry(one.tensor, name, slots, state, plain.get(name, {}))
            elif name in members:
                self._states[one.tensor] = {}
            elif state is None or state:
                self.differences.missing(name, next(iter(state or {}), "optimizer state"))
        self._groups = taken_settings(
            self.manifest, optimizer, lambda param: by_param.get(id(param)), self.differences
        )

    def _is_alias(self, name: str, slot: str) -> bool:
        return slot == MASTER and self._is_weight(name)

    def _want_entry(
        self,
        param: Tensor,
        name: str,
        slots: list[str],
        expected: State | None,
        plain: Mapping[str, object],
    ) -> None:
        """Build the state of one parameter."""
        state: dict[str, object] = {}
        complete = True
        counted = [] if self._stated_step(name) is None else [STEP]
        keys = list(expected) if expected is not None else [*counted, *slots]
        for key in keys:
            like = None if expected is None else expected[key]
            if key in plain:
                continue
            if key == STEP and _is_count(like):
                made = self._want_step(param, name, like)
            elif key in slots:
                made = self._want_slot(param, name, key, like)
            elif isinstance(like, Tensor):
                self.differences.missing(name, key)
                made = None
            else:
                made = like
            complete = complete and made is not None
            state[key] = made
        state |= copy.deepcopy(dict(plain))
        self._states[param] = state if complete else {}

    def _want_step(self, param: Tensor, name: str, like: object) -> object | None:
        """Return the step of a parameter in the form in which its optimizer counts."""
        step = self._stated_step(name)
        if step is None:
            self.differences.missing(name, STEP)
            return None
        if isinstance(like, (int, float)):
            return type(like)(step)
        if like is None:
            like = torch.zeros(())
        made = _made_like(like, param) if isinstance(like, Tensor) else None
        if made is not None:
            self._installs.append(partial(local_of(made, STEP).data.fill_, step))
        return made

    def _stated_step(self, name: str) -> int | float | None:
        stated = self.manifest.objects.get(STEP)
        step = stated.get(name) if isinstance(stated, Mapping) else stated
        return None if isinstance(step, bool) or not isinstance(step, (int, float)) else step

    def _want_slot(self, param: Tensor, name: str, slot: str, like: object) -> Tensor | None:
        """Return the tensor of a slot, which is filled when all is installed."""
        spec = self.manifest.tensors[self._index[name, slot]]
        if not isinstance(like, Tensor):
            like = _new_like(param, spec)
        made = _made_like(like, param)
        local = local_of(made, f"{name} ({slot})")
        fresh = self._read(name, slot, local, name, into=made is not like)
        if fresh is None:
            return None
        if fresh is not local.data:
            self._installs.append(partial(local.data.copy_, fresh))
        return made


def _is_count(like: object) -> bool:
    """Say whether a step is one number, as far as is known."""
    return like is None or isinstance(like, (int, float)) or _is_single(like)


def _is_single(like: object) -> bool:
    return isinstance(like, Tensor) and like.numel() == 1


def _new_like(param: Tensor, spec: TensorSpec) -> Tensor:
    """Return, on ``meta``, what stands for a slot of which only the checkpoint tells."""
    kind = getattr(torch, spec.dtype.name)
    if spec.shape != tuple(param.shape):
        return torch.empty(spec.shape, dtype=kind, device="meta")
    distributed = as_distributed(param)
    if distributed is None:
        return torch.empty_like(param, dtype=kind, device="meta")
    local = torch.empty_like(local_data(distributed), dtype=kind, device="meta")
    return like_distributed(local, distributed)


def _made_like(like: Tensor, param: Tensor) -> Tensor:
    """Return a tensor that is there already, or one in memory for what is on ``meta``."""
    distributed = as_distributed(like)
    data = like if distributed is None else local_data(distributed)
    if data.device.type != "meta":
        return like
    cut = as_distributed(param)
    device = param.device if cut is None else local_data(cut).device
    made = torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device=device)
    return made if distributed is None else like_distributed(made, distributed)
