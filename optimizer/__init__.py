"""Sharded optimizers whose checkpoints one can open: ZeRO-1 as in Megatron-LM, ZeRO-2 as in Apex.

>>> import torch
>>> from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig
>>> model = torch.nn.Linear(3, 2)
>>> optimizer = DistributedOptimizer(model, OptimizerConfig(lr=0.1, clip_grad=0.0))
>>> model(torch.ones(3)).sum().backward()
>>> optimizer.step()
>>> sorted(optimizer.state_dict()["state"])
['bias', 'weight']
"""

from ckpttools.optimizer.agreement import RemoteError
from ckpttools.optimizer.buffers import Bucket, ParamAndGradBuffer
from ckpttools.optimizer.collectives import Collectives, Work, collectives_for
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.distributed_fused_adam import DistributedFusedAdam
from ckpttools.optimizer.distributed_optimizer import DistributedOptimizer
from ckpttools.optimizer.factory import get_megatron_optimizer, megatron_groups
from ckpttools.optimizer.gather import Gathered, gather_to_zero
from ckpttools.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, GradScaler
from ckpttools.optimizer.groups import ParallelGroups
from ckpttools.optimizer.parameters import Sharding
from ckpttools.optimizer.ranges import Range
from ckpttools.optimizer.recording import RecordingCollectives
from ckpttools.optimizer.sharded_optimizer import ShardedOptimizer
from ckpttools.optimizer.yaml_args import parse_yaml_args

__all__ = [
    "Bucket",
    "Collectives",
    "ConstantGradScaler",
    "DistributedFusedAdam",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "Gathered",
    "GradScaler",
    "OptimizerConfig",
    "ParallelGroups",
    "ParamAndGradBuffer",
    "Range",
    "RecordingCollectives",
    "RemoteError",
    "ShardedOptimizer",
    "Sharding",
    "Work",
    "collectives_for",
    "gather_to_zero",
    "get_megatron_optimizer",
    "megatron_groups",
    "parse_yaml_args",
]
