"""What is in a checkpoint? Plain data from its structure alone."""

from __future__ import annotations

from ckpttools.formats import Reading
from ckpttools.manifest import summary_by_slot


def describe(path: str, format_name: str, reading: Reading) -> dict[str, object]:
    """Describe a checkpoint as read; where several layouts fit, as the first of them has it."""
    manifest = reading.candidates[0].manifest
    objects = manifest.objects
    return {
        "path": path,
        "format": format_name,
        "layouts": ["/".join(c.layouts) for c in reading.candidates],
        "buckets": objects.get("buckets"),
        "topology": objects.get("topology"),
        "layers": objects.get("layers"),
        "iteration": objects.get("iteration"),
        "step": objects.get("step"),
        "files": [{"path": f.path, "size_bytes": f.size_bytes} for f in manifest.files],
        "slots": {
            slot: {"tensors": count, "bytes": size}
            for slot, (count, size) in summary_by_slot(manifest.tensors).items()
        },
        "tensors": [
            {
                "name": spec.name,
                "slot": spec.slot,
                "dtype": spec.dtype.name,
                "shape": list(spec.shape),
                "padding_rows": spec.padding_rows,
                "chunks": len(chunks),
            }
            for spec, chunks in zip(manifest.tensors, manifest.by_tensor(), strict=True)
        ],
        "notes": list(reading.notes),
    }
