"""Which faults can stages, model chunks and chained optimizers have? As in megatron_faults."""

from __future__ import annotations

import re
from typing import Any

import megatron_edit as edit
from megatron_edit import args, every, one
from megatron_faults import MODEL0, PP2, TP1, Fault

VPP2 = "deep_tp1_pp2_dp1_vpp2"
STAGE0 = "{root}/iter_0000003/mp_rank_00_000/model_optim_rng.pt: "
STAGE1 = "{root}/iter_0000003/mp_rank_00_001/model_optim_rng.pt: "


def into_first_chunk(tree: Any) -> None:
    """Move the layer of a stage's second chunk behind that of its first one."""
    for name in [name for name in tree["model1"] if name.startswith("decoder.layers.0.")]:
        tree["model0"][name.replace(".0.", ".1.", 1)] = tree["model1"].pop(name)


STAGE_FAULTS: dict[str, Fault] = {
    "more model chunks than the arguments say": Fault(
        PP2,
        every(lambda tree: tree.update(model0=tree.pop("model"), model1={})),
        STAGE0 + "must have 1 model chunks as the arguments say, got 2",
    ),
    "fewer model chunks than the arguments say": Fault(
        PP2,
        args(virtual_pipeline_model_parallel_size=2),
        STAGE0 + "must have 2 model chunks as the arguments say, got 1",
    ),
    "model chunk is missing": Fault(
        VPP2,
        every(lambda tree: tree.update(model2=tree.pop("model1"))),
        STAGE0 + "must have 'model', or 'model0', 'model1' …, got .'model0', 'model2'.",
    ),
    "model beside its chunks": Fault(
        VPP2,
        every(lambda tree: tree.update(model=tree["model0"])),
        STAGE0 + "must have 'model', or 'model0', 'model1' …, got .'model0', 'model1', 'model'.",
    ),
    "no model": Fault(
        PP2,
        every(lambda tree: tree.pop("model")),
        STAGE0 + "must have 'model', or 'model0', 'model1' …, got ..",
    ),
    "layers in other chunks than the arguments say": Fault(
        VPP2,
        one(edit.MODEL, 0, into_first_chunk),
        STAGE0
        + re.escape("layers must be split as ((1, 1), (1, 1)) by the arguments, got ")
        + re.escape("((2, 0), (1, 1))"),
    ),
    "layers that the arguments can't split": Fault(
        PP2,
        args(account_for_loss_in_pipeline_split=True),
        STAGE0 + "pipeline: 3 layers must divide over 2 stages, got a rest or nothing for them",
    ),
    "instances that don't share the ranks": Fault(
        TP1,
        args(num_distributed_optimizer_instances=3),
        MODEL0 + "args.num_distributed_optimizer_instances must divide DP x CP = 2, got 3",
    ),
    "one optimizer where the arguments say two": Fault(
        VPP2,
        args(overlap_param_gather_with_optimizer_step=True),
        "layout: exactly one must agree with the files, got none: .*/mp_rank_00_000/"
        "distrib_optim.pt: must have 2 optimizers, as the arguments say, got 1.*",
    ),
    "optimizers of several rank files differ in number": Fault(
        VPP2,
        one(edit.MODEL, 1, lambda tree: tree.update(optimizer=[tree["optimizer"]] * 2)),
        STAGE1 + "must have as many optimizers as its optimizer file, got 2 and 1",
    ),
    "heterogeneous layers": Fault(
        PP2,
        args(heterogeneous_layers_config_path="layers.json"),
        STAGE0 + "args.heterogeneous_layers_config_path must be None .heterogeneous layers is not "
        "supported., got 'layers.json'",
        verify=1,
    ),
    "multi-token prediction": Fault(
        VPP2,
        args(mtp_num_layers=1),
        STAGE0 + "args.mtp_num_layers must be None .multi-token prediction layers .*, got 1",
        verify=1,
    ),
}
