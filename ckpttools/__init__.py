"""Take the sharded state of a training run from any layout to any other, and prove it.

Public names are loaded when they are first used, so that ``import ckpttools`` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckpttools.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ckpttools.api import (
        detect_format,
        diff,
        digest,
        format_names,
        gather,
        inspect,
        open_checkpoint,
        plan_reshard,
        read_manifest,
        reshard,
        strip,
        verify,
    )
    from ckpttools.errors import CkptError
    from ckpttools.executor import Resources, execute
    from ckpttools.formats import ReadOptions, Target
    from ckpttools.manifest import Manifest
    from ckpttools.plan import Plan
    from ckpttools.report import Report
    from ckpttools.selection import Selection

_HOMES = {
    "CkptError": "ckpttools.errors",
    "Manifest": "ckpttools.manifest",
    "Plan": "ckpttools.plan",
    "ReadOptions": "ckpttools.formats",
    "Report": "ckpttools.report",
    "Resources": "ckpttools.executor",
    "Target": "ckpttools.formats",
    "detect_format": "ckpttools.api",
    "diff": "ckpttools.api",
    "digest": "ckpttools.api",
    "execute": "ckpttools.executor",
    "format_names": "ckpttools.api",
    "gather": "ckpttools.api",
    "inspect": "ckpttools.api",
    "open_checkpoint": "ckpttools.api",
    "plan_reshard": "ckpttools.api",
    "read_manifest": "ckpttools.api",
    "reshard": "ckpttools.api",
    "strip": "ckpttools.api",
    "verify": "ckpttools.api",
    "Selection": "ckpttools.selection",
}

__all__ = [
    "CkptError",
    "Manifest",
    "Plan",
    "ReadOptions",
    "Report",
    "Resources",
    "Selection",
    "Target",
    "detect_format",
    "diff",
    "digest",
    "execute",
    "format_names",
    "gather",
    "inspect",
    "open_checkpoint",
    "plan_reshard",
    "read_manifest",
    "reshard",
    "strip",
    "verify",
]


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ckpttools' has no attribute {name!r}")
