"""What a training script calls to save and load: sharded, gathered, on any topology."""

from ckpttools.hooks.gathered import save_gathered
from ckpttools.hooks.restore import Restored, load_sharded
from ckpttools.hooks.sharded import save_sharded

__all__ = ["Restored", "load_sharded", "save_gathered", "save_sharded"]
