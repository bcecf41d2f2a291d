"""Settings have Megatron's names and defaults, and what is misspelled or unsound is refused."""

from __future__ import annotations

import argparse
import copy
import pickle
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from ckpttools.errors import ConfigError, StorageError, UnsupportedError
from ckpttools.optimizer.config import ARGUMENT_NAMES, SETTING_NAMES, OptimizerConfig
from ckpttools.optimizer.yaml_args import parse_yaml_args

ROOT = Path(__file__).resolve().parents[2]

# Megatron-core 0.16.1: megatron/core/optimizer/optimizer_config.py and
# megatron/core/distributed/distributed_data_parallel_config.py.
MEGATRON_DEFAULTS: dict[str, object] = {
    "optimizer": "adam",
    "lr": None,
    "min_lr": None,
    "decoupled_lr": None,
    "decoupled_min_lr": None,
    "weight_decay": 0.01,
    "fp16": False,
    "bf16": False,
    "params_dtype": torch.float32,
    "loss_scale": None,
    "initial_loss_scale": 2**32,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "decoupled_weight_decay": True,
    "use_distributed_optimizer": False,
    "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
    "clip_grad": 1.0,
    "log_num_zeros_in_grad": False,
    "grad_reduce_in_fp32": False,
    "overlap_grad_reduce": False,
    "bucket_size": None,
    "pad_buckets_for_high_nccl_busbw": False,
}
APEX_DEFAULTS: dict[str, object] = {
    "bucket_cap_mb": 100.0,
    "pipeline_size": 2,
    "average_grad_sync": True,
    "contiguous_param_buffer": False,
    "contiguous_grad_buffer": False,
    "store_params": True,
    "store_param_remainders": False,
    "with_scaled_states": False,
}
OURS: dict[str, object] = {"kernel": "fused", "bias_correction": True, "unused_parameters": "skip"}


def test_names_and_defaults_are_megatrons_and_apexs_and_three_are_ours() -> None:
    config = OptimizerConfig()
    found = {item.name: getattr(config, item.name) for item in fields(config)}
    assert found == MEGATRON_DEFAULTS | APEX_DEFAULTS | OURS
    assert sorted(SETTING_NAMES) == sorted(found)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("overlap_param_gahter", "overlap_param_gather"),
        ("use_distibuted_optimizer", "use_distributed_optimizer"),
        ("lrr", "lr"),
        ("beta1", "adam_beta1"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known(name: str, nearest: str) -> None:
    message = f"OptimizerConfig: must be a known setting, got '{name}' \\(did you mean {nearest}\\?"
    with pytest.raises(ConfigError, match=message) as caught:
        OptimizerConfig(**{name: True})  # type: ignore[arg-type]
    assert caught.value.hint == f"did you mean {nearest}?"


def test_an_unknown_setting_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError, match="got 'zzzzqqq'$") as caught:
        OptimizerConfig(zzzzqqq=1)  # type: ignore[call-arg]
    assert caught.value.hint == ""


def test_an_unknown_attribute_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        OptimizerConfig().overlap_param_gahter = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("lr", -1e-3, "a finite number at least 0, got -0.001"),
        ("lr", "1e-3", "a finite number at least 0, got '1e-3'"),
        ("lr", True, "a finite number at least 0, got True"),
        ("weight_decay", None, "a finite number at least 0, got None"),
        ("clip_grad", float("nan"), "a finite number at least 0, got nan"),
        ("initial_loss_scale", 10**400, "a finite number above 0, got 1000"),
        ("adam_beta1", 1.0, "a finite number from 0 to below 1, got 1.0"),
        ("adam_beta2", -0.1, "a finite number from 0 to below 1, got -0.1"),
        ("loss_scale", 0.0, "a finite number above 0, got 0.0"),
        ("bucket_size", 0, "a whole number at least 1, got 0"),
        ("bucket_size", 1.5, "a whole number at least 1, got 1.5"),
        ("hysteresis", None, "a whole number at least 1, got None"),
        ("bf16", 1, "true or false, got 1"),
        ("overlap_grad_reduce", "yes", "true or false, got 'yes'"),
        ("optimizer", "sgd", "one of adam, distributed_fused_adam, got 'sgd'"),
        ("kernel", "cuda", "one of fused, foreach, apex, transformer_engine, got 'cuda'"),
        ("unused_parameters", "zero", "one of skip, decay, got 'zero'"),
        ("params_dtype", "int8", "float32, bfloat16 or float16, got 'int8'"),
        ("params_dtype", torch.int8, "float32, bfloat16 or float16, got torch.int8"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object, must: str) -> None:
    with pytest.raises(ConfigError, match=f"^OptimizerConfig: {name} must be {must}"):
        OptimizerConfig(**{name: value})  # type: ignore[arg-type]
    config = OptimizerConfig()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"^OptimizerConfig: {name} must be {must}"):
        config.validate()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": True, "bf16": True}, "at most one of fp16 and bf16 may be set, got both"),
        ({"lr": 0.1, "min_lr": 0.2}, "min_lr must be at most lr, got 0.2 and 0.1"),
        (
            {"decoupled_lr": 0.1, "decoupled_min_lr": 0.2},
            "decoupled_min_lr must be at most decoupled_lr, got 0.2 and 0.1",
        ),
        (
            {"initial_loss_scale": 4, "min_loss_scale": 8},
            "min_loss_scale must be at most initial_loss_scale, got 8 and 4",
        ),
        (
            {"bf16": True, "params_dtype": torch.float16},
            "params_dtype must be torch.bfloat16 or torch.float32 with bf16, got torch.float16",
        ),
        (
            {"fp16": True, "params_dtype": "bf16"},
            "params_dtype must be torch.float16 or torch.float32 with fp16, got torch.bfloat16",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^OptimizerConfig: {message}$"):
        OptimizerConfig(**settings)  # type: ignore[arg-type]


def test_values_get_their_own_type() -> None:
    config = OptimizerConfig(lr=1, loss_scale_window=500.0, bucket_size=10_000_000.0)  # type: ignore[arg-type]
    values = (config.lr, config.loss_scale_window, config.bucket_size)
    assert values == (1.0, 500, 10_000_000)
    assert [type(value) for value in values] == [float, int, int]


@pytest.mark.parametrize("value", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_may_be_given_by_name(value: torch.dtype | str) -> None:
    assert OptimizerConfig(params_dtype=value).params_dtype == torch.bfloat16


def test_the_parameters_dtype_follows_the_precision_flag_unless_given() -> None:
    assert OptimizerConfig(bf16=True).params_dtype == torch.bfloat16
    assert OptimizerConfig(fp16=True).params_dtype == torch.float16
    assert OptimizerConfig(bf16=True, params_dtype="fp32").params_dtype == torch.float32


def test_copies_and_pickles_are_equal_and_replace_checks_again() -> None:
    config = OptimizerConfig(lr=0.5, bf16=True, kernel="foreach")
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert replace(config, lr=0.25) == OptimizerConfig(lr=0.25, bf16=True, kernel="foreach")
    with pytest.raises(ConfigError, match="did you mean lr?"):
        replace(config, lrr=1)  # type: ignore[call-arg]


def test_overlap_without_a_sharded_optimizer_is_refused_where_none_is_made() -> None:
    OptimizerConfig(overlap_grad_reduce=True).require_unsharded()
    for name in ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"):
        config = OptimizerConfig(**{name: True})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{name} needs use_distributed_optimizer"):
            config.require_unsharded()
        replace(config, use_distributed_optimizer=True).require_unsharded()
    assert not OptimizerConfig().sharded
    assert OptimizerConfig(use_distributed_optimizer=True).sharded
    assert OptimizerConfig(optimizer="distributed_fused_adam").sharded


def test_buckets_close_at_megatrons_default_only_where_reduction_overlaps() -> None:
    assert OptimizerConfig().bucket_limit(8) is None
    assert OptimizerConfig(overlap_grad_reduce=True).bucket_limit(8) == 40_000_000
    assert OptimizerConfig(overlap_grad_reduce=True).bucket_limit(41) == 41_000_000
    assert OptimizerConfig(bucket_size=7).bucket_limit(8) == 7
    assert OptimizerConfig(bucket_size=7, overlap_grad_reduce=True).bucket_limit(8) == 7


def test_settings_are_read_from_megatrons_arguments_by_either_name() -> None:
    arguments = argparse.Namespace(
        lr=0.5,
        accumulate_allreduce_grads_in_fp32=True,
        ddp_bucket_size=10,
        ddp_pad_buckets_for_high_nccl_busbw=True,
        bucket_size=10,
        weight_decay=None,  # not given, so the default stays
        num_layers=12,
        end_weight_decay=0.1,
        use_precision_aware_optimizer=False,
    )
    expected = OptimizerConfig(
        lr=0.5, grad_reduce_in_fp32=True, bucket_size=10, pad_buckets_for_high_nccl_busbw=True
    )
    assert OptimizerConfig.from_args(arguments) == expected
    assert OptimizerConfig.from_args(vars(arguments)) == expected
    assert set(ARGUMENT_NAMES.values()) <= set(SETTING_NAMES)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"bucket_size": 10, "ddp_bucket_size": 11},
            "bucket_size must have one value under all its names, got 10 and 11",
        ),
        (
            {"overlap_param_gahter": True},
            "must be a known setting, got 'overlap_param_gahter' \\(did you mean",
        ),
        ({"clip_gard": 2.0}, "must be a known setting, got 'clip_gard' \\(did you mean clip_grad"),
        (
            {"use_precision_aware_optimizer": True},
            "use_precision_aware_optimizer must be False, nothing else is done here, got True",
        ),
    ],
)
def test_arguments_that_would_be_passed_over_wrongly_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"arguments: {message}"):
        OptimizerConfig.from_args(given)
    with pytest.raises(ConfigError, match="OptimizerConfig: optimizer must be one of"):
        OptimizerConfig.from_args(argparse.Namespace(optimizer="muon"))


# ---- YAML --------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_configuration_sets_what_it_says() -> None:
    args = parse_yaml_args(ROOT / "docs" / "configs" / "gpt2.yaml")
    args.overlap_param_gather_with_optimizer_step = True
    assert (args.num_layers, args.hidden_size, args.vocab_size) == (12, 768, 50257)
    assert OptimizerConfig.from_args(args) == OptimizerConfig(
        lr=6e-4,
        min_lr=6e-5,
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=True,
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        overlap_param_gather_with_optimizer_step=True,
        bucket_size=10_000_000,
    )


@pytest.mark.parametrize(
    "text",
    [
        "lr: 1e-3\nbf16: true\nddp_bucket_size: 7\n",
        "optimizer: {lr: .1E-2, bf16: yes, bucket_size: 7}\n",
        "optimizer:\n  lr: 1.0e-3\ntraining:\n  bf16: true\nmodel_parallel:\n  bucket_size: 7\n",
        "base: &base {bf16: true}\noptimizer:\n  <<: *base\n  lr: 0.001\n  bucket_size: 7\n",
    ],
)
def test_flat_and_nested_files_say_the_same(text: str, tmp_path: Path) -> None:
    args = parse_yaml_args(write(tmp_path, text))
    assert type(args) is argparse.Namespace
    assert OptimizerConfig.from_args(args) == OptimizerConfig(lr=1e-3, bf16=True, bucket_size=7)


def test_optimizer_may_name_a_section_or_the_setting(tmp_path: Path) -> None:
    flat = parse_yaml_args(write(tmp_path, "optimizer: distributed_fused_adam"))
    nested = parse_yaml_args(write(tmp_path, "optimizer: {optimizer: distributed_fused_adam}"))
    assert vars(flat) == vars(nested) == {"optimizer": "distributed_fused_adam"}


def test_other_sections_hold_anything_and_null_is_not_given(tmp_path: Path) -> None:
    text = "model: {seed: 5, name: 1e4x, sizes: [1, 2], deep: {a: 1}}\noptimizer: {lr: null}\n"
    args = parse_yaml_args(write(tmp_path, text))
    assert vars(args) == {
        "seed": 5,
        "name": "1e4x",
        "sizes": [1, 2],
        "deep": {"a": 1},
        "lr": None,
    }
    assert OptimizerConfig.from_args(args) == OptimizerConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {lrr: 1}", "must be a known setting, got 'lrr' \\(did you mean lr\\?\\)"),
        ("num_layers: 12", "must be a known setting, got 'num_layers'"),
        ("lr: high", "lr must be a finite number at least 0, got 'high'"),
        ("optimizer: {accumulate_allreduce_grads_in_fp32: 1}", "must be true or false, got 1"),
        ("a: {seed: 1}\nb: {seed: 2}", "seed must have one value, got 1 and 2"),
        ("lr: 1\nlr: 2", "must be plain YAML, got the key 'lr' stands twice, line 2"),
        (
            "optimizer:\n  lr: 1\n  lr: 2",
            "must be plain YAML, got the key 'lr' stands twice, line 3",
        ),
        ("model: {a b: 1}", "a key must be a name as Python's are, got 'a b'"),
        ("model: {1: 1}", "a key must be a name as Python's are, got 1"),
        ("- lr", "must be a mapping, got list"),
        ("", "must be a mapping, got nothing"),
        ("lr: [1", "must be plain YAML, got expected .* line 1"),
        ("lr: !!python/object/apply:os.getcwd []", "must be plain YAML, got could not determine"),
        ("lr: \x00", "must be plain YAML, got "),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_yaml_args(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"lr: \xff\xfe\n")
    with pytest.raises(ConfigError, match="must be plain YAML, got ") as caught:
        parse_yaml_args(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="none.yaml: can't use it: No such file"):
        parse_yaml_args(tmp_path / "none.yaml")


def test_without_pyyaml_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UnsupportedError, match="reading YAML needs PyYAML, got") as caught:
        parse_yaml_args(write(tmp_path, "lr: 1"))
    assert caught.value.hint == "pip install 'ckpttools[torch]'"
