"""Let megatron-core load every tensor of a distributed NeMo directory, and tell what it holds.

    python nemo_oracle.py DIR OUT TP

Asks for DIR in the parts of TP tensor ranks (dimension 0 of each tensor, layers apart, where TP
divides it), and writes OUT.safetensors and OUT.json with what ``common.pt`` held.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file


def main(directory, out, tp):
    import megatron_on_cpu  # beside this program; not where tests are collected

    megatron_on_cpu.activate()  # before anything of Megatron is imported
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wanted = {}
    for key, meta in dist_checkpointing.load_tensors_metadata(directory).items():
        shape = list(meta.global_shape)
        stacked = ".layers." in key
        local, prepend = shape[1:] if stacked else shape, int(stacked)
        parts = tp if local[0] % tp == 0 else 1
        local[0] //= parts
        for layer in range(shape[0] if stacked else 1):
            for rank in range(parts):
                cuts = [(0, layer, shape[0])] if stacked else []
                if parts > 1:
                    cuts.append((prepend, rank, parts))
                empty = torch.empty(local, dtype=meta.dtype)
                wanted[f"{key}/{layer}/{rank}"] = ShardedTensor.from_rank_offsets(
                    key, empty, *cuts, prepend_axis_num=prepend
                )
    loaded = dist_checkpointing.load({"wanted": wanted}, directory)
    save_file(loaded.pop("wanted"), f"{out}.safetensors")
    with open(f"{out}.json", "w") as file:
        json.dump(loaded, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
