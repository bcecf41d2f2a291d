"""What a training script calls to save and load: sharded, gathered, on any topology."""

from ckpttools.hooks.gathered import save_gathered
from ckpttools.hooks.general import load_general, save_general
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.restore import Restored, load_sharded
from ckpttools.hooks.sharded import save_sharded
from ckpttools.hooks.torch_hooks import add_training_state, save_after_step

__all__ = [
    "CheckpointManager",
    "Restored",
    "add_training_state",
    "load_general",
    "load_sharded",
    "save_after_step",
    "save_gathered",
    "save_general",
    "save_sharded",
]
