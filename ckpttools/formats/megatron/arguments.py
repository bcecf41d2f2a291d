"""What do a checkpoint's ``args`` say of the run, and how do they change with the topology?

``args`` is an ``argparse.Namespace`` of some 500 to 660 settings; most are carried as they are.
This module reads those that the layout depends on, refuses runs whose layout isn't covered, and
rewrites those that follow from the topology. Source: megatron/training/arguments.py and
megatron/training/checkpointing.py (``check_checkpoint_args``) of core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ckpttools.errors import FormatError, UnsupportedError, UsageError
from ckpttools.layout.megatron import default_bucket_size, round_up
from ckpttools.layout.pipeline import Split
from ckpttools.storage.inert import Inert, qualified_name

RANK_KEYS = frozenset({"rank", "local_rank"})
"""Arguments that differ between the files of one checkpoint."""

_MUST_BE_OFF = (
    ("expert_model_parallel_size", (1,), "expert parallelism"),
    ("num_experts", (None,), "mixture of experts"),
    ("mtp_num_layers", (None, 0), "multi-token prediction layers"),
    ("use_megatron_fsdp", (False,), "Megatron-FSDP"),
    ("heterogeneous_layers_config_path", (None,), "heterogeneous layers"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """The settings that the layout of a dense GPT run depends on.

    ``vocab_size`` is the true number of rows where the file tells it; ``bucket_size`` what the
    arguments imply for the first stage.
    """

    tp: int
    pp: int
    dp: int
    cp: int
    num_layers: int
    num_attention_heads: int
    vocab_size: int | None
    vocab_divisor: int
    padded_vocab_size: int | None
    gated: bool
    tied: bool
    output_gate: bool
    busbw: bool
    bucket_size: int | None
    decay_qk_layernorm: bool
    rank_order_tp_pp_dp: bool
    vpp: int
    split: Split
    custom_split: bool
    instances: int
    chained: bool

    @property
    def buffer_ranks(self) -> int:
        """Ranks that share a dense buffer: data times context parallel, within one instance."""
        return self.dp * self.cp // self.instances

    @property
    def facts(self) -> Mapping[str, bool]:
        """What the rules may depend on."""
        return {"gated": self.gated, "tied": self.tied, "output_gate": self.output_gate}

    def padded_rows(self, rows: int, tp: int) -> int:
        """Return how many rows Megatron gives a vocabulary of ``rows`` at TP ``tp``."""
        return round_up(rows, self.vocab_divisor * tp)

    def with_topology(self, *, tp: int, pp: int, vpp: int, dp: int) -> Run:
        """Return the same run on another topology.

        Raises:
            UsageError: Megatron has no such topology for this model.
        """
        for name, size in (("tp", tp), ("pp", pp), ("vpp", vpp), ("dp", dp)):
            if size < 1:
                raise UsageError(f"--{name}: must be at least 1, got {size}")
        if self.num_attention_heads % tp:
            raise UsageError(
                f"--tp: must divide the {self.num_attention_heads} attention heads, got {tp}"
            )
        if vpp > 1 and pp == 1:
            raise UsageError(f"--vpp: needs more than one pipeline stage, got {vpp}")
        if dp * self.cp % self.instances:
            raise UsageError(
                f"--dp: DP x CP must divide over {self.instances} optimizer instances, got "
                f"{dp * self.cp}"
            )
        return replace(self, tp=tp, pp=pp, vpp=vpp, dp=dp)

    def global_rank(self, tp: int, pp: int) -> int:
        """Return the global rank of data-parallel rank zero of (tp, pp)."""
        if self.rank_order_tp_pp_dp:
            return tp + self.tp * pp
        return tp + self.tp * self.cp * self.dp * pp


def settings_of(args: object, where: str) -> dict[str, object]:
    """Return the settings of an ``args`` object.

    Raises:
        FormatError: it is not an ``argparse.Namespace``.
    """
    if (
        isinstance(args, Inert)
        and qualified_name(args) == "argparse.Namespace"
        and isinstance(args.state, dict)
        and all(isinstance(key, str) for key in args.state)
    ):
        return {str(key): value for key, value in args.state.items()}
    raise FormatError(f"{where}: args must be an argparse.Namespace, got {args!r:.80}")


def read_run(settings: Mapping[str, object], where: str) -> Run:
    """Read what the layout depends on.

    Raises:
        FormatError: a setting is missing or of the wrong kind.
        UnsupportedError: the run is of a kind that isn't covered.
    """
    reader = _Settings(settings, where)
    for key, allowed, what in _MUST_BE_OFF:
        if settings.get(key, allowed[0]) not in allowed:
            raise UnsupportedError(
                f"{where}: args.{key} must be {allowed[0]} ({what} is not supported), got "
                f"{settings[key]!r}"
            )
    if settings.get("use_distributed_optimizer") is not True:
        raise UnsupportedError(
            f"{where}: args.use_distributed_optimizer must be True, got "
            f"{settings.get('use_distributed_optimizer')!r}"
        )
    dp, cp = reader.size("data_parallel_size"), reader.size("context_parallel_size", 1)
    return Run(
        tp=reader.size("tensor_model_parallel_size"),
        pp=reader.size("pipeline_model_parallel_size"),
        dp=dp,
        cp=cp,
        num_layers=reader.size("num_layers"),
        num_attention_heads=reader.size("num_attention_heads"),
        vocab_size=reader.optional_size("vocab_size"),
        vocab_divisor=reader.size("make_vocab_size_divisible_by"),
        padded_vocab_size=reader.optional_size("padded_vocab_size"),
        gated=reader.flag("swiglu") or reader.flag("quick_geglu", default=False),
        tied=not reader.flag("untie_embeddings_and_output_weights"),
        output_gate=reader.flag("attention_output_gate", default=False),
        busbw=reader.flag("ddp_pad_buckets_for_high_nccl_busbw", default=False),
        bucket_size=_bucket_size(reader, dp * cp),
        decay_qk_layernorm=_decay_qk_layernorm(reader),
        rank_order_tp_pp_dp=reader.flag("use_tp_pp_dp_mapping", default=False),
        vpp=reader.size("virtual_pipeline_model_parallel_size", 1),
        split=_split(reader),
        custom_split=settings.get("pipeline_model_parallel_layout") is not None,
        instances=_instances(reader, dp * cp),
        chained=reader.flag("overlap_param_gather_with_optimizer_step", default=False),
    )


def check_same_run(settings: Mapping[str, object], first: Mapping[str, object], where: str) -> None:
    """Check that a rank's settings describe the run that the first rank's do.

    Raises:
        FormatError: a setting that the layout depends on differs.
    """
    run, expected = read_run(settings, where), read_run(first, where)
    for field in fields(Run):
        mine, theirs = getattr(run, field.name), getattr(expected, field.name)
        if mine != theirs:
            raise FormatError(
                f"{where}: args must describe the same run in all rank files, got {field.name} "
                f"{mine} and {theirs}"
            )


def rewrite(args: Inert, run: Run, *, tp: int, pp: int, padded_vocab_size: int | None) -> Inert:
    """Return ``args`` as they are for rank (tp, pp) of ``run``; the order of keys stays.

    Settings that the source doesn't have are not added, and those that only say in another way
    how stages are cut (``num_layers_per_virtual_pipeline_stage`` and its like) are filled where
    the source has filled them.
    """
    state = settings_of(args, "args")
    rank = run.global_rank(tp, pp)
    world_size = run.tp * run.pp * run.dp * run.cp
    changes: dict[str, object] = {
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "data_parallel_size": run.dp,
        "world_size": world_size,
        "inprocess_active_world_size": world_size,
        "rank": rank,
        "local_rank": rank,
    }
    if padded_vocab_size is not None:
        changes["padded_vocab_size"] = padded_vocab_size
    changes |= _pipeline_changes(state, run)
    state.update({key: value for key, value in changes.items() if key in state})
    return replace(args, state=state)


def _pipeline_changes(state: Mapping[str, object], run: Run) -> dict[str, object]:
    """Return the settings that say how layers are cut over stages."""
    changes: dict[str, object] = {
        "virtual_pipeline_model_parallel_size": run.vpp if run.vpp > 1 else None,
        "decoder_first_pipeline_num_layers": run.split.first,
        "decoder_last_pipeline_num_layers": run.split.last,
        "account_for_embedding_in_pipeline_split": run.split.embedding,
        "account_for_loss_in_pipeline_split": run.split.loss,
    }
    if not run.custom_split:
        changes["pipeline_model_parallel_layout"] = None
    # Megatron takes one of the two, the first only where all chunks are of one size; embedding
    # and loss are part of it where they count as layers.
    by_size = state.get("num_layers_per_virtual_pipeline_stage") is not None
    if by_size or state.get("num_virtual_stages_per_pipeline_rank") is not None:
        counted = run.num_layers + run.split.embedding + run.split.loss
        by_size = by_size and not run.custom_split and not run.split.uneven
        chunk, number = counted // (run.pp * run.vpp), run.vpp
        interleaved = run.vpp > 1
        changes["num_layers_per_virtual_pipeline_stage"] = (
            chunk if interleaved and by_size else None
        )
        changes["num_virtual_stages_per_pipeline_rank"] = (
            number if interleaved and not by_size else None
        )
    return changes


def _split(reader: _Settings) -> Split:
    """Return how the arguments cut layers over stages."""
    return Split(
        first=reader.optional_size("decoder_first_pipeline_num_layers"),
        last=reader.optional_size("decoder_last_pipeline_num_layers"),
        embedding=reader.flag("account_for_embedding_in_pipeline_split", default=False),
        loss=reader.flag("account_for_loss_in_pipeline_split", default=False),
    )


def _instances(reader: _Settings, ranks: int) -> int:
    """Return the number of optimizer instances, which share the ranks evenly."""
    instances = reader.size("num_distributed_optimizer_instances", 1)
    if ranks % instances:
        raise FormatError(
            f"{reader.where}: args.num_distributed_optimizer_instances must divide DP x CP = "
            f"{ranks}, got {instances}"
        )
    return instances


def _bucket_size(reader: _Settings, ranks: int) -> int | None:
    """Return the bucket size that the arguments imply; buckets need overlapped gradients."""
    if not reader.flag("overlap_grad_reduce", default=False):
        return None
    return reader.optional_size("ddp_bucket_size") or default_bucket_size(ranks)


def _decay_qk_layernorm(reader: _Settings) -> bool:
    """Say whether weight decay applies to the norms of queries and keys."""
    condition = reader.settings.get("no_weight_decay_cond_type")
    if condition not in (None, "apply_wd_to_qk_layernorm"):
        raise UnsupportedError(
            f"{reader.where}: args.no_weight_decay_cond_type must be None or "
            f"'apply_wd_to_qk_layernorm', got {condition!r}"
        )
    return condition is not None or reader.flag("apply_wd_to_qk_layernorm", default=False)


@dataclass(frozen=True, slots=True)
class _Settings:
    """Typed access to settings, with errors that name the file."""

    settings: Mapping[str, object]
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive number."""
        value = self.settings.get(key, default)
        if value is None:
            value = default
        if type(value) is not int or value < 1:
            raise FormatError(f"{self.where}: args.{key} must be a size, got {value!r}")
        return value

    def optional_size(self, key: str) -> int | None:
        """Return a positive number, or None where there is none."""
        return None if self.settings.get(key) is None else self.size(key)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Return a truth value."""
        value = self.settings.get(key, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}: args.{key} must be True or False, got {value!r}")
        return value
