"""Which faults can a Megatron checkpoint have, and in which line does each end?

Every fault is made in a copy of a fixture that a real run wrote, with right checksums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import megatron_edit as edit
from megatron_edit import (
    TRACKER,
    Change,
    again,
    args,
    cut,
    every,
    groups,
    longer,
    one,
    remove,
    renamed,
    step,
    tracker,
)

TP1, TP2, PP2, BY_POSITION = (
    "gqa_tp1_pp1_dp2",
    "gqa_tp2_pp1_dp2",
    "gqa_tp1_pp2_dp2",
    "v0.12.3_tied_tp2_pp1_dp1",
)
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in a copy of a fixture: the line it ends in, and how verify exits.

    ``message`` is a pattern in which ``{root}`` stands for the copy.
    """

    fixture: str
    change: Change
    message: str
    verify: int = 3
    hint: str = ""


def transposed(tree: Any) -> None:
    tensor = tree["model"][FC2]
    shape = tensor.shape[::-1]
    tree["model"][FC2] = replace(tensor, shape=shape, strides=edit.row_major(shape))


def unknown_name(tree: Any) -> None:
    entries = [(k.replace("linear_fc2", "gate"), v) for k, v in tree["model"].items()]
    tree["model"].clear()
    tree["model"].update(entries)


def overlapping(tree: Any) -> None:
    model = tree["model"]
    model[FC2] = replace(model[FC2], offset=model[FC2].offset - 64)


MODEL0 = "{root}/iter_0000003/mp_rank_00/model_optim_rng.pt: "
MODEL1 = "{root}/iter_0000003/mp_rank_01/model_optim_rng.pt: "
OPTIM1 = "{root}/iter_0000003/mp_rank_01/distrib_optim.pt: "
NO_END = "must end with a zip end record, got a file cut short or with more behind it"
OLDER = "must not be there for TP . x PP 1 as the arguments say, got a directory of another save"

FAULTS: dict[str, Fault] = {
    # Directories and files.
    "rank directory is missing": Fault(
        TP2,
        remove("mp_rank_01"),
        "{root}/iter_0000003/mp_rank_01: must be there for TP 2 x PP 1 as the arguments say, got "
        "none",
    ),
    "first rank is missing": Fault(
        TP2,
        remove("mp_rank_00"),
        "{root}/iter_0000003: must have the files of rank .0, 0., got none",
    ),
    "stage is missing": Fault(
        PP2,
        remove("mp_rank_00_001"),
        "{root}/iter_0000003/mp_rank_00_001: must be there for TP 1 x PP 2 as the arguments say, "
        "got none",
    ),
    "model file is missing": Fault(
        TP2,
        remove("mp_rank_01/model_optim_rng.pt"),
        MODEL1 + "every rank must have this file, got none",
    ),
    "optimizer file of one rank is missing": Fault(
        TP2,
        remove("mp_rank_01/distrib_optim.pt"),
        OPTIM1 + "every rank must have this file or none, got 1 of 2 ranks without",
    ),
    "all optimizer files are missing": Fault(
        TP2,
        remove("mp_rank_00/distrib_optim.pt", "mp_rank_01/distrib_optim.pt"),
        "{root}/iter_0000003/mp_rank_00/distrib_optim.pt: must be there, as the parameter groups "
        "in {root}/iter_0000003/mp_rank_00/model_optim_rng.pt say, got no optimizer state at all",
        hint="give --accept-loss optimizer to go on with the weights alone",
    ),
    "model file is cut short": Fault(TP2, cut(edit.MODEL, 30000), MODEL1 + NO_END),
    "optimizer file is cut short": Fault(TP2, cut(edit.OPTIMIZER, -1), OPTIM1 + NO_END),
    "model file is too long": Fault(TP2, longer, MODEL1 + NO_END),
    "model file is empty": Fault(
        TP2,
        cut(edit.MODEL, 0),
        MODEL1 + "must be a zip archive, .*, got first bytes none",
    ),
    "TP4 save under a TP2 save": Fault(
        TP2,
        again("mp_rank_00", "mp_rank_02", "mp_rank_03"),
        "{root}/iter_0000003/mp_rank_02: " + OLDER,
        hint="move it away",
    ),
    "TP2 save under a TP1 save": Fault(
        TP1,
        again("mp_rank_00", "mp_rank_01"),
        "{root}/iter_0000003/mp_rank_01: " + OLDER,
        hint="move it away",
    ),
    "PP2 save under a PP1 save": Fault(
        TP1,
        again("mp_rank_00", "mp_rank_00_000"),
        "{root}/iter_0000003/mp_rank_00_000: each rank must be there once, got mp_rank_00 too",
        hint="move the directory of the other save away",
    ),
    "PP1 save under a PP2 save": Fault(
        PP2,
        again("mp_rank_00_000", "mp_rank_00"),
        "{root}/iter_0000003/mp_rank_00_000: each rank must be there once, got mp_rank_00 too",
        hint="move the directory of the other save away",
    ),
    "stage directory of a run without stages": Fault(
        TP1,
        renamed("mp_rank_00", "mp_rank_00_000"),
        "{root}/iter_0000003/mp_rank_00: must be there for TP 1 x PP 1 as the arguments say, got "
        "none",
    ),
    "expert-parallel directory": Fault(
        PP2,
        renamed("mp_rank_00_001", "mp_rank_00_000_001"),
        "{root}/iter_0000003/mp_rank_00_000_001: a rank directory must name tensor and pipeline "
        "rank, got an expert-parallel one, which is not supported",
        verify=1,
    ),
    "no tracker": Fault(
        TP1,
        lambda root: (root / TRACKER).unlink(),
        "{root}/latest_checkpointed_iteration.txt: a checkpoint directory must have it, got none",
        hint="name one iteration, such as iter_0000003, in place of the directory",
    ),
    "tracker with a path": Fault(
        TP1,
        tracker("../../x"),
        "{root}/latest_checkpointed_iteration.txt: must hold an iteration number or 'release', "
        "got b'../../x'",
    ),
    "tracker of another iteration": Fault(
        TP1,
        tracker("7"),
        "{root}/iter_0000007: must hold rank directories, as latest_checkpointed_iteration.txt "
        "says",
    ),
    "tracker that is long": Fault(
        TP1,
        tracker("7" * 100),
        "{root}/latest_checkpointed_iteration.txt: must hold an iteration number or 'release'",
    ),
    "file of another iteration": Fault(
        TP2,
        one(edit.MODEL, 1, lambda tree: tree.update(iteration=2)),
        MODEL1 + "iteration must be that of iter_0000003, got 2",
    ),
    "two formats fit": Fault(
        TP1,
        lambda root: (root / "state.json").write_text("{}"),
        "{root}: must be of exactly one known format, got megatron and safetensors",
        verify=1,
        hint="name it with --format",
    ),
    # What a model file says of its run.
    "version unknown": Fault(
        TP1,
        one(edit.MODEL, 0, lambda tree: tree.update(checkpoint_version=4.0)),
        MODEL0 + "checkpoint_version must be 3.0, got 4.0",
    ),
    "version missing": Fault(
        TP1,
        one(edit.MODEL, 0, lambda tree: tree.pop("checkpoint_version")),
        MODEL0 + "checkpoint_version must be 3.0, got None",
    ),
    "args are a dict": Fault(
        TP1,
        one(edit.MODEL, 0, lambda tree: tree.update(args={"rank": 0})),
        MODEL0 + "args must be an argparse.Namespace, got .'rank': 0.",
    ),
    "args lack a size": Fault(
        TP2,
        every(lambda tree: tree["args"].state.pop("num_layers")),
        MODEL0 + "args.num_layers must be a size, got None",
    ),
    "args have a size as text": Fault(
        TP2,
        args(tensor_model_parallel_size="2"),
        MODEL0 + "args.tensor_model_parallel_size must be a size, got '2'",
    ),
    "rank files of two runs": Fault(
        TP2,
        one(edit.MODEL, 1, lambda tree: tree["args"].state.update(num_layers=4)),
        MODEL1 + "args must describe the same run in all rank files, got num_layers 4 and 2",
    ),
    "rank files of two topologies": Fault(
        TP2,
        one(edit.MODEL, 1, lambda t: t["args"].state.update(tensor_model_parallel_size=4)),
        MODEL1 + "args must describe the same run in all rank files, got tp 4 and 2",
    ),
    "wrong number of layers": Fault(
        TP2,
        args(num_layers=3),
        MODEL0 + "all stages must have 3 layers together, got ..2,.,.",
    ),
    "wrong data-parallel size": Fault(
        TP1,
        args(data_parallel_size=3),
        "layout: exactly one must agree with the files, got none: .* the weights' storage must "
        "have 23040 elements by the buffer formula, got 22912.*",
    ),
    "mixture of experts": Fault(
        TP1,
        args(num_experts=8),
        MODEL0 + "args.num_experts must be None .mixture of experts .*, got 8",
        verify=1,
    ),
    "no distributed optimizer": Fault(
        TP1,
        args(use_distributed_optimizer=False),
        MODEL0 + "args.use_distributed_optimizer must be True, got False",
        verify=1,
    ),
    # Parameters.
    "tensor ranks with different parameters": Fault(
        TP2,
        one(edit.MODEL, 1, lambda tree: tree["model"].pop(FC2)),
        MODEL1 + f"model must have the same entries as tensor rank 0, got .'{FC2}'.",
    ),
    "tensor ranks with another order": Fault(
        TP2,
        one(edit.MODEL, 1, lambda tree: tree["model"].update({FC2: tree["model"].pop(FC2)})),
        MODEL1 + "model must have the same entries as tensor rank 0, got another order",
    ),
    "tensor ranks with different shapes": Fault(
        TP2,
        one(edit.MODEL, 1, transposed),
        MODEL1 + f"{FC2} must be bfloat16 .32, 24. as on tensor rank 0, got bfloat16 .24, 32.",
    ),
    "layer without a parameter": Fault(
        TP2,
        every(lambda tree: tree["model"].pop(FC2)),
        MODEL0 + "layers must have the same parameters, got mlp.linear_fc2.weight only in layer 0 "
        "and not in layer 1",
    ),
    "model without a parameter": Fault(
        TP1,
        every(lambda tree: tree["model"].pop("decoder.final_layernorm.weight")),
        "layout: exactly one must agree with the files, got none: .* must start at element .*",
    ),
    "unknown parameter": Fault(
        TP2,
        every(unknown_name),
        "decoder.layers.0.mlp.gate.weight: must match exactly one rule of the built-in rules "
        "megatron_gpt.toml, got none",
        verify=1,
        hint="describe the parameter in a rules file and give it with --rules FILE",
    ),
    "overlapping parameters": Fault(
        TP1,
        one(edit.MODEL, 0, overlapping),
        f"layout: exactly one must agree with the files, got none: .*: {FC2} must start at "
        "element .*",
    ),
    # Parameter groups.
    "step is a fraction": Fault(
        TP2,
        every(step(2.5)),
        MODEL0 + "step must be a whole number, got 2.5",
    ),
    "step is no number": Fault(TP2, every(step("3")), MODEL0 + "step must be a number, got '3'"),
    "step is NaN": Fault(
        TP2, every(step(float("nan"))), MODEL0 + "step must be a whole number, got nan"
    ),
    "step differs between ranks": Fault(
        TP2,
        one(edit.MODEL, 1, lambda tree: [g.update(step=4.0) for g in groups(tree)]),
        MODEL1 + "step must be the same in all groups, got 4.0 and 3.0 in " + MODEL0[:-2],
    ),
    "step differs between groups": Fault(
        TP1,
        one(edit.MODEL, 0, lambda tree: groups(tree)[1].update(step=4.0)),
        MODEL0 + "step must be the same in all groups, got 4.0 and 3.0 in " + MODEL0[:-2],
    ),
    "group is there twice": Fault(
        TP2,
        every(lambda tree: groups(tree).append(dict(groups(tree)[0]))),
        MODEL0 + "parameter groups must differ, got two of .*'wd_mult': 1.0.*",
    ),
    "group differs between ranks": Fault(
        TP2,
        one(edit.MODEL, 1, lambda tree: groups(tree)[1].update(eps=1e-5)),
        MODEL1 + "eps of the parameter group .* must be that of .*, got 1e-05 and 1e-08",
    ),
    "group is missing on a rank": Fault(
        TP2,
        one(edit.MODEL, 1, lambda tree: groups(tree).pop()),
        MODEL1 + "every rank must list the same parameter groups in the same order, got .*",
    ),
    "groups that go by position stand in another order": Fault(
        BY_POSITION,
        every(lambda tree: groups(tree).reverse()),
        MODEL0 + "parameter groups must be in first-seen order .*, got .*",
    ),
    "optimizer state without groups": Fault(
        TP2,
        every(lambda tree: groups(tree).clear()),
        MODEL0 + "must list parameter groups, as distrib_optim.pt is there, got none",
    ),
    "optimizer file of a save without optimizer": Fault(
        TP2,
        every(lambda tree: tree.pop("optimizer")),
        MODEL0 + "must list parameter groups, as distrib_optim.pt is there, got none",
    ),
    "slot that one rank lacks": Fault(
        TP2,
        one(edit.OPTIMIZER, 1, lambda tree: next(iter(tree[0].values())).pop("exp_avg_sq")),
        ".*exp_avg_sq.*",
    ),
}
