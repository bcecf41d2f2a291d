"""Is every stored byte of a torch.distributed.checkpoint as it was written?"""

from __future__ import annotations

from pathlib import Path

from ckpttools.errors import CkptError
from ckpttools.formats import Problem
from ckpttools.formats.dcp.sidecar import read_sidecar
from ckpttools.formats.dcp.stored import has_containers, read_stored
from ckpttools.storage.dcp_items import check_items
from ckpttools.storage.dcp_metadata import METADATA_FILE, read_metadata


def check_directory(path: Path) -> list[Problem]:
    """Check every archive's sums and constants, and that the metadata's items are all there is."""
    try:
        read_stored(path)
        read_sidecar(path)
        if not (path / METADATA_FILE).is_file():
            return []
        metadata = read_metadata(path)
        if has_containers(path, metadata):
            return []
        return [Problem(*found) for found in check_items(path, metadata)]
    except CkptError as error:
        return [Problem(str(path), str(error))]
