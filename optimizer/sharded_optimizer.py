"""What do the sharded optimizers have in common? Everything but how buckets are made and sent.

Construction checks and names the parameters, in one order on every rank. A subclass then builds
its buffers and shards, hands them over by :meth:`ShardedOptimizer._own`, and has a step. State by
name, in torch's form, in Megatron's form, and the description of the run are the same code for
all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ckpttools.errors import OptimizerError
from ckpttools.layout.sharded import Kind, ShardedLayout
from ckpttools.optimizer.adam import AdamSettings, check_kernel
from ckpttools.optimizer.building import (
    check_ranks_agree,
    collect_together,
    torch_defaults,
    torch_groups,
)
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.describe import (
    RankDescription,
    check_live,
    exchange,
    join_ranks,
)
from ckpttools.optimizer.gather import gathered_param_state
from ckpttools.optimizer.grad_scaler import GradScaler, scaler_of
from ckpttools.optimizer.groups import ParallelGroups
from ckpttools.optimizer.live import Items, LiveBucket, LiveBuffer, LivePiece, LiveShard, LiveSlot
from ckpttools.optimizer.norms import StepFacts, agree
from ckpttools.optimizer.parameters import ManagedParam, Params, Rename, Sharding
from ckpttools.optimizer.state import load_rank_state, rank_state
from ckpttools.optimizer.torch_form import gathered_torch_state, load_torch_state


class ShardedOptimizer(torch.optim.Optimizer):
    """An Adam whose state is sharded over the data-parallel ranks.

    ``managed`` are all parameters, ``trains`` the names of those that are trained. ``buffers``,
    ``shards`` and ``pieces`` are what this rank holds; ``steps`` counts for each parameter.

    Raises:
        OptimizerError: parameters are given twice, have no name, are of an unsupported kind, or
            differ between ranks.
        ConfigError: settings contradict each other.
    """

    kind: Kind
    buffers: Sequence[LiveBuffer] = ()
    shards: Sequence[LiveShard] = ()
    pieces: Sequence[LivePiece] = ()

    def __init__(
        self,
        params: Params,
        config: OptimizerConfig,
        *,
        modules: Sequence[nn.Module],
        groups: ParallelGroups | None,
        shardings: Mapping[str, Sharding] | None,
        rename: Rename | None,
        collectives: Collectives | None,
        check_values: bool,
        defaults: Mapping[str, Any] | None = None,
        agreed: Items = (),
    ) -> None:
        self.config = config
        self.parallel = groups or ParallelGroups()
        self._collected, self.dp = collect_together(
            params, shardings or {}, rename, modules, self.parallel, collectives
        )
        device = self._collected.device
        check_kernel(self.config.kernel, device)
        self.tp = self.parallel.collectives("tp", device)
        self.pp = self.parallel.collectives("pp", device)
        self.model_groups = tuple(g for g in (self.tp, self.pp) if g.size > 1)
        self.managed: tuple[ManagedParam, ...] = (
            *self._collected.trained,
            *self._collected.frozen,
        )
        self.trains = frozenset(managed.name for managed in self._collected.trained)
        own = torch_defaults(config) | dict(defaults or {})
        self._building = True
        super().__init__(torch_groups(self._collected, own), own)
        self._building = False
        self._redundant = self.parallel.collectives("redundant", device)
        replicas = self.dp, self._redundant
        check_ranks_agree(
            self._collected, self.config, replicas, values=check_values, agreed=agreed
        )
        self.steps: dict[str, int] = {}
        self.scaler: GradScaler | None = scaler_of(self.config, device=device)
        self.num_zeros_in_grad: int | None = None

    def _own(
        self,
        buffers: Sequence[LiveBuffer],
        shards: Sequence[LiveShard],
        pieces: Sequence[LivePiece],
    ) -> None:
        """Take over what this rank holds, with step counts of zero."""
        self.buffers, self.shards, self.pieces = buffers, shards, pieces
        self._all_slots: tuple[LiveSlot, ...] = tuple(s for b in buffers for s in b.slots)
        self._position = {slot.name: i for i, slot in enumerate(self._all_slots)}
        self.steps = {slot.name: 0 for slot in self._all_slots}

    # ---- what a subclass does ------------------------------------------------------------

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them, for all micro-batches but the last."""

    @property
    @abstractmethod
    def in_no_sync(self) -> bool:
        """Whether this is inside :meth:`no_sync`, in the middle of an accumulation."""

    @property
    @abstractmethod
    def has_pending_gradients(self) -> bool:
        """Whether this rank has gradients that no step has used since they were last cleared.

        They are in no checkpoint. A step that was skipped for non-finite gradients may leave such.
        A gradient that the caller put at a parameter counts from the reduction on. Makes no
        collective call.
        """

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Wait until this rank's piece of every bucket holds the sum over the ranks."""

    @abstractmethod
    def start_param_sync(self) -> None:
        """Gather all parameters, asynchronously, in the order in which a forward needs them."""

    @abstractmethod
    def finish_param_sync(self) -> None:
        """Wait until all parameters are whole on this rank."""

    @abstractmethod
    def _describe_rank(self) -> RankDescription:
        """Describe this rank's parameters and buffers."""

    # ---- the step ------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale (fp16); other runs get it back as it is."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def _agree(
        self, *, want_norm: bool, want_finite: bool, amp_found: bool | None = None
    ) -> StepFacts:
        """Exchange norm, non-finite values and used parameters."""
        decays = self.config.unused_parameters == "decay"
        used = [slot.used or (decays and slot.param.requires_grad) for slot in self._all_slots]
        return agree(
            self.pieces,
            used,
            want_norm=want_norm,
            want_finite=want_finite,
            want_zeros=self.config.log_num_zeros_in_grad,
            amp_found=amp_found,
            dp=self.dp,
            redundant=self._redundant,
            model=self.model_groups,
            device=self._collected.device,
        )

    def _group_settings(self) -> list[AdamSettings]:
        """Return what each parameter group asks of Adam now."""
        decoupled, correct = self.config.decoupled_weight_decay, self.config.bias_correction
        return [
            AdamSettings.from_group(
                group,
                decoupled=decoupled,
                bias_correction=bool(group.get("bias_correction", correct)),
            )
            for group in self.param_groups
        ]

    def _count_steps(self, facts: StepFacts) -> None:
        """Count a step of every parameter that takes one."""
        for name, used in zip(self.steps, facts.used, strict=True):
            self.steps[name] += used

    def _is_used(self, facts: StepFacts) -> Callable[[LivePiece], bool]:
        return lambda piece: facts.used[self._position[piece.name]]

    def _counts_in_norm(self, slot: LiveSlot) -> bool:
        """Say whether this rank's copy of a parameter is the one that a norm counts."""
        sharding = slot.managed.sharding
        return not sharding.tied_to and (sharding.split is not None or self.tp.rank == 0)

    # ---- state ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the buffers are laid out once, at construction.

        Raises:
            OptimizerError: always, but while the optimizer is being built.
        """
        if not self._building:
            raise OptimizerError(
                "add_param_group: parameters must be given at construction, got a group later",
                hint="build a new optimizer and load the state of this one into it",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own part of the state, by name; makes no collective call.

        Tensors are views, not copies. ``ckpttools inspect`` tells of a file of it which rank it is
        and which ranks are missing.
        """
        return rank_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` of the same rank of an equal optimizer returned.

        Touches masters, moments, step counts and group settings, and nothing else: no parameter,
        no random state, no loss scale but the one in it.

        Raises:
            OptimizerError: it is of another rank, world size or model; nothing was changed.
        """
        load_rank_state(self, state_dict)

    def sharded_param_state_dp_zero(self) -> dict[int, dict[Any, dict[str, Any]]] | None:
        """Gather the state to data-parallel rank zero, in Megatron's form; None elsewhere.

        A collective call. No rank needs more than a bucket beside what it has; rank zero gets the
        whole state in host memory.
        """
        return gathered_param_state(self)

    def gather_torch_state_dict(self) -> dict[str, Any] | None:
        """Gather the state to data-parallel rank zero in torch's own form; None elsewhere.

        A collective call. What it returns loads into ``torch.optim.AdamW`` of the same groups.
        """
        return gathered_torch_state(self)

    def load_torch_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a state in torch's own form, of which every rank has the whole.

        Raises:
            OptimizerError: it is another model's; nothing was changed.
        """
        load_torch_state(self, state_dict)

    @abstractmethod
    def shard_of(self, bucket: LiveBucket) -> LiveShard:
        """Return this rank's state of one bucket of :attr:`buffers`."""

    def describe(self) -> ShardedLayout:
        """Return the layout of the whole run: which element of which tensor is on which rank.

        A collective call of all ranks; the value is the same on each.

        Raises:
            OptimizerError: tensor ranks don't have the same parameters, or a tied embedding isn't
                marked on every stage that has it.
        """
        found = exchange(self._describe_rank(), self.dp, self.tp, self.pp)
        layout = join_ranks(
            {(tp, pp): one for (tp, dp, pp), one in found.items() if dp == 0}, self.dp.size
        )
        check_live(self, layout)
        return layout

    def reload_model_params(self) -> None:
        """Make the masters anew of the parameters, as after loading weights alone."""
        for shard in self.shards:
            shard.read_params()

    @property
    def param_gather_handle(self) -> object | None:
        """A gather that is under way, or None."""
        handles = (b.param_gather_handle for buffer in self.buffers for b in buffer.buckets)
        return next((handle for handle in handles if handle is not None), None)
