"""Which options go together, what a configuration asks for, and in which order buckets are."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch_reference import (
    assert_same_bits,
    exact_grads,
    snapshot,
    weights,
)

from ckpttools.errors import ConfigError, OptimizerError
from ckpttools.layout.fixed_buckets import FixedBuckets
from ckpttools.optimizer import (
    DistributedFusedAdam,
    DistributedOptimizer,
    OptimizerConfig,
    ParallelGroups,
    get_megatron_optimizer,
    parse_yaml_args,
)
from ckpttools.optimizer.fused_settings import FusedSettings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIB = 2**20
SMALL = 600 * 4 / MIB
REMAINDERS: dict[str, Any] = {"store_params": False, "store_param_remainders": True}
SCALED: dict[str, Any] = {"with_scaled_states": True, "dtype": FP16}


def test_options_have_apex_s_defaults() -> None:
    settings = DistributedFusedAdam(weights()).settings
    assert {f.name: getattr(settings, f.name) for f in fields(settings)} == {
        "dtype": FP32,
        "grad_sync_dtype": FP32,
        "param_sync_dtype": FP32,
        "average_grad_sync": True,
        "overlap_grad_sync": True,
        "overlap_param_sync": False,
        "bucket_cap_mb": 100.0,
        "pipeline_size": 2,
        "contiguous_param_buffer": False,
        "contiguous_grad_buffer": False,
        "store_params": True,
        "store_param_remainders": False,
        "with_scaled_states": False,
    }
    (group,) = DistributedFusedAdam(weights()).param_groups
    kept = {key: value for key, value in group.items() if not key.startswith("param")}
    assert kept == {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"amsgrad": True},
            (
                "amsgrad must be false, since Apex and Megatron-LM have none and no checkpoint "
                "format of theirs could hold it, got True"
            ),
        ),
        (
            {"capturable": True},
            (
                "capturable must be false, since a step decides on the host what to skip, so no "
                "CUDA graph can hold it, got True"
            ),
        ),
        (
            {"nccl_ub": True},
            "nccl_ub must be false, since buffers come from torch's own allocator, got True",
        ),
        (
            {"store_param_remainders": True, "param_sync_dtype": BF16},
            "store_param_remainders needs store_params=False, got True",
        ),
        (
            {**REMAINDERS, "dtype": BF16, "param_sync_dtype": BF16},
            "store_param_remainders needs dtype float32, got torch.bfloat16",
        ),
        (REMAINDERS, "store_param_remainders needs param_sync_dtype bfloat16, got torch.float32"),
        (
            {**SCALED, **REMAINDERS, "dtype": FP32, "param_sync_dtype": BF16},
            "with_scaled_states needs store_param_remainders=False, got True",
        ),
        (
            {**SCALED, "store_params": False},
            "with_scaled_states needs store_params=True, got False",
        ),
        (
            {"with_scaled_states": True},
            "with_scaled_states needs dtype float16 or bfloat16, got torch.float32",
        ),
        (
            {**SCALED, "param_sync_dtype": FP32},
            "with_scaled_states needs a param_sync_dtype other than float32, got torch.float32",
        ),
        (
            {"dtype": FP16},
            (
                "dtype must be float32 without with_scaled_states, since 16 bits lose what a step "
                "adds, got torch.float16"
            ),
        ),
        (
            {"grad_sync_dtype": torch.float64},
            "grad_sync_dtype must be float32, bfloat16 or float16, got torch.float64",
        ),
        (
            {"param_sync_dtype": torch.complex64},
            (
                "param_sync_dtype must be a floating-point dtype, or an integer one for the "
                "parameters' own bytes, got torch.complex64"
            ),
        ),
        (
            {"param_sync_dtype": BF16},
            (
                "param_sync_dtype must hold the parameters, which are torch.float32, got "
                "torch.bfloat16"
            ),
        ),
        ({"pipeline_size": 0}, "pipeline_size must be at least 1, got 0"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be above 0, got 0"),
        ({"store_params": 1}, "store_params must be true or false, got 1"),
    ],
)
def test_options_that_contradict_or_have_no_meaning_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^DistributedFusedAdam: {re.escape(message)}$"):
        DistributedFusedAdam(weights(), **options)


def test_what_megatrons_settings_refuse_is_refused_here_too() -> None:
    with pytest.raises(ConfigError, match="adam_beta1 must be a finite number from 0 to below 1"):
        DistributedFusedAdam(weights(), betas=(1.0, 0.9))
    with pytest.raises(ConfigError, match="unused_parameters must be one of skip, decay, got 'no'"):
        DistributedFusedAdam(weights(), unused_parameters="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^overlap_param_sync: the optimizer must be given the"):
        DistributedFusedAdam(weights().named_parameters(), overlap_param_sync=True)
    with pytest.raises(OptimizerError, match="add_param_group: parameters must be given at const"):
        DistributedFusedAdam(weights()).add_param_group({"params": []})


def test_apex_s_process_groups_are_not_given_beside_ours() -> None:
    assert run_ranks(_groups, 1) == [True]


def _groups() -> bool:
    world = dist.group.WORLD
    with pytest.raises(ConfigError, match="groups and process groups exclude, got both"):
        DistributedFusedAdam(weights(), process_group=world, groups=ParallelGroups())
    with pytest.raises(ConfigError, match="redundant_process_group needs distributed_process_gr"):
        DistributedFusedAdam(weights(), redundant_process_group=world)
    return DistributedFusedAdam(weights(), process_group=world).dp.size == 1


def test_a_master_is_kept_by_what_the_parameter_is_and_the_options_say() -> None:
    plain, halves = FusedSettings(), FusedSettings(**REMAINDERS, param_sync_dtype=BF16)
    alone = FusedSettings(store_params=False)
    scaled = FusedSettings(dtype=FP16, with_scaled_states=True, param_sync_dtype=FP16)
    kinds = FP32, BF16, FP16
    assert [plain.master(kind) for kind in kinds] == ["weight", "stored", "stored"]
    assert [halves.master(kind) for kind in kinds] == ["weight", "remainder", "stored"]
    assert [alone.master(kind) for kind in kinds] == ["weight", "weight", "weight"]
    assert [scaled.master(kind) for kind in kinds] == ["weight", "scaled", "scaled"]
    assert FusedSettings(grad_sync_dtype=None).buckets(BF16) == FixedBuckets(50 * MIB, 64)


def test_a_configuration_is_read_under_megatrons_names() -> None:
    config = OptimizerConfig(
        optimizer="distributed_fused_adam",
        lr=0.5,
        bf16=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=4096,
        pipeline_size=3,
        store_params=False,
        store_param_remainders=True,
        contiguous_grad_buffer=True,
        average_grad_sync=False,
    )
    optimizer = get_megatron_optimizer(config, weights(dtype=BF16))
    assert isinstance(optimizer, DistributedFusedAdam)
    assert optimizer.settings == FusedSettings(
        grad_sync_dtype=None,
        param_sync_dtype=BF16,
        average_grad_sync=False,
        overlap_grad_sync=True,
        overlap_param_sync=True,
        bucket_cap_mb=4096 * 2 / MIB,
        pipeline_size=3,
        contiguous_grad_buffer=True,
        store_params=False,
        store_param_remainders=True,
    )
    assert optimizer.buffers[0].rule == FixedBuckets(4096, 64)
    assert [group["wd_mult"] for group in optimizer.param_groups] == [1.0, 0.0]
    assert optimizer.config.unused_parameters == "decay"
    assert OptimizerConfig().unused_parameters == "skip"


def test_a_yaml_file_may_use_apex_s_names(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    file.write_text(
        "optimizer:\n  optimizer: distributed_fused_adam\n  lr: 1e-3\n  bucket_cap_mb: 12.5\n"
        "  overlap_grad_sync: true\n  overlap_param_sync: true\n  pipeline_size: 4\n"
    )
    optimizer = get_megatron_optimizer(parse_yaml_args(file), weights())
    assert isinstance(optimizer, DistributedFusedAdam)
    settings = optimizer.settings
    assert (settings.bucket_cap_mb, settings.pipeline_size) == (12.5, 4)
    assert settings.overlap_grad_sync
    assert settings.overlap_param_sync
    file.write_text("optimizer:\n  bucket_cap: 1\n")
    with pytest.raises(ConfigError, match="got 'bucket_cap' .did you mean bucket_cap_mb"):
        parse_yaml_args(file)


def test_one_configuration_builds_either_optimizer_and_both_train_alike() -> None:
    settings: dict[str, Any] = {"lr": 0.01, "clip_grad": 0.0, "bucket_size": 500}
    left, right = weights(), weights()
    one = get_megatron_optimizer({**settings, "use_distributed_optimizer": True}, left)
    two = get_megatron_optimizer({**settings, "optimizer": "distributed_fused_adam"}, right)
    assert isinstance(one, DistributedOptimizer)
    assert isinstance(two, DistributedFusedAdam)
    for step in range(3):
        for model, optimizer in ((left, one), (right, two)):
            optimizer.zero_grad()
            model(exact_grads(model, step, 0)).backward()
            optimizer.step()
    assert_same_bits("both", snapshot(left), snapshot(right))


def test_scaled_states_of_a_configuration_are_float16() -> None:
    config = OptimizerConfig(
        optimizer="distributed_fused_adam", lr=0.5, with_scaled_states=True, bf16=True
    )
    optimizer = DistributedFusedAdam.from_config(config, weights(dtype=BF16))
    assert {t.dtype for t in optimizer.shards[0].slots().values()} == {FP16, FP32}
