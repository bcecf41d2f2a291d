"""When must a gathered parameter be there? Before the module that owns it runs.

A hook before each module's forward waits for the buckets of the module's own parameters, and for
no other: so the first layers compute while the last ones are still on their way. Whoever asks for
a whole ``state_dict`` gets whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from ckpttools.errors import ConfigError
from ckpttools.optimizer.live import LiveBucket, LiveBuffer


class ForwardGathers:
    """Waits for parameter gathers as modules need them.

    Raises:
        ConfigError: it is to wait, and there are no modules to hook.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        buffers: Sequence[LiveBuffer],
        *,
        wait: bool,
        setting: str = "overlap_param_gather",
    ) -> None:
        self._handles: list[RemovableHandle] = []
        if not wait:
            return
        if not modules:
            raise ConfigError(
                f"{setting}: the optimizer must be given the module, got parameters alone"
            )
        buckets_of: dict[int, list[LiveBucket]] = {}
        everything = [bucket for buffer in buffers for bucket in buffer.buckets]
        for bucket in everything:
            for slot in bucket.slots:
                buckets_of.setdefault(id(slot.param), []).append(bucket)
        for root in modules:
            for module in root.modules():
                owned = [buckets_of.get(id(p), []) for p in module.parameters(recurse=False)]
                buckets = list(dict.fromkeys(bucket for mine in owned for bucket in mine))
                if buckets:
                    hook = partial(_wait, buckets)
                    self._handles.append(module.register_forward_pre_hook(hook))
            saving = partial(_wait_before_saving, everything)
            handle = root.register_state_dict_pre_hook(saving)  # type: ignore[no-untyped-call]  # torch's stubs lack it
            self._handles.append(handle)

    def remove_hooks(self) -> None:
        """Leave the modules alone from now on."""
        for handle in self._handles:
            handle.remove()


def _wait(buckets: Sequence[LiveBucket], module: nn.Module, args: object) -> None:
    del module, args
    for bucket in buckets:
        bucket.finish_param_sync()


def _wait_before_saving(
    buckets: Sequence[LiveBucket],
    module: nn.Module,
    prefix: str,
    keep_vars: bool,  # torch's own
) -> None:
    del module, prefix, keep_vars
    for bucket in buckets:
        bucket.finish_param_sync()
