"""How is a torch.distributed.checkpoint read? Keys to names and slots, boxes to chunks.

1. Arrays and objects come from the container (`ckpttools.formats.dcp.stored`).
2. Each key is a weight, a slot, a step, a setting or something else (`.keys`).
3. Steps, settings and whatever else is no tensor are read; tensors only get their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ckpttools.errors import FormatError, LayoutError, UnsupportedError, UsageError
from ckpttools.formats import Candidate, CarriedDocument, Reading, ReadOptions
from ckpttools.formats.dcp.keys import Keys, Naming, sort_keys
from ckpttools.formats.dcp.names import with_names
from ckpttools.formats.dcp.settings import adam_w_mode, read_groups
from ckpttools.formats.dcp.sidecar import Sidecar, read_sidecar
from ckpttools.formats.dcp.state import FORMAT, NUMBERS, PLAIN_STEP, DcpState, Other, is_plain
from ckpttools.formats.dcp.stored import Stored, read_stored
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.manifest import WEIGHT, Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.dcp_items import read_object
from ckpttools.storage.inert_encoder import encode
from ckpttools.storage.stored_arrays import StoredArray
from ckpttools.storage.torchzip import StorageRef, TensorRef

LAYOUT = "boxes"
STEP = "step"
_MAX_OTHER_BYTES = 1 << 20


def read_directory(path: Path, options: ReadOptions) -> Reading:
    """Read a directory.

    Raises:
        FormatError: a file is missing, damaged or contradicts the others.
        UnsupportedError: it is of a kind that isn't read.
        UsageError: parameters have numbers alone, and nobody gave their names.
    """
    if options.layout not in (None, LAYOUT):
        raise UsageError(f"--layout: must be {LAYOUT}, got {options.layout!r}")
    stored = read_stored(path)
    keys = sort_keys(stored.arrays, stored.objects, stored.paths, where=str(path))
    reader = _Reader(path, stored, keys)
    keys = with_names(keys, reader.members(), options, str(path))
    return _Reader(path, stored, keys).reading(read_sidecar(path))


class _Reader:
    """One pass over a directory whose keys are known."""

    def __init__(self, path: Path, stored: Stored, keys: Keys) -> None:
        self.path = path
        self.stored = stored
        self.keys = keys
        self.notes: list[str] = []

    def members(self) -> list[object]:
        """Return the members of each group, as stored."""
        return [
            self.value(key)
            for (group, setting), key in self.keys.settings.items()
            if isinstance(group, int) and setting == "params"
        ]

    def reading(self, sidecar: Sidecar) -> Reading:
        """Return what the directory holds."""
        steps, values, slots, step_kind = self.optimizer_state()
        by_name = {name: {WEIGHT: key} for name, key in self.keys.weights.items()}
        for (name, slot), key in slots.items():
            by_name[name][slot] = key
        tensors, chunks = [], []
        files: dict[str, int] = {}
        for name, mine in by_name.items():
            for slot, key in mine.items():
                array = self.stored.arrays[key]
                tensors.append(self.spec(name, slot, array, sidecar))
                chunks += list(self.chunks(len(tensors) - 1, array, files))
        objects = self.objects(sidecar, steps, values, step_kind)
        listed = tuple(File(name, (self.path / name).stat().st_size) for name in files)
        try:
            manifest = Manifest(
                FORMAT, str(self.path), listed, tuple(tensors), tuple(chunks), objects
            )
        except LayoutError as error:
            raise FormatError(f"{self.path}: {error}") from error
        if not self.keys.state and not self.keys.settings:
            self.notes.append("weights only: the checkpoint has no optimizer state")
        return Reading((Candidate((LAYOUT,), manifest),), notes=tuple(self.notes))

    # ---- tensors -------------------------------------------------------------------------

    def spec(self, name: str, slot: str, array: StoredArray, sidecar: Sidecar) -> TensorSpec:
        """Return a tensor, whose rows of padding stand beside it."""
        padding = sidecar.padding.get((name, slot), 0)
        if not padding:
            return TensorSpec(name, slot, array.dtype, array.shape)
        if not array.shape or array.shape[0] < padding:
            raise FormatError(
                f"{self.path}: {array.key}: must have {padding} rows of padding, got the shape "
                f"{list(array.shape)}"
            )
        shape = (array.shape[0] - padding, *array.shape[1:])
        return TensorSpec(name, slot, array.dtype, shape, padding)

    def chunks(self, tensor: int, array: StoredArray, files: dict[str, int]) -> Iterator[Chunk]:
        """Yield the chunks of a tensor; an empty box holds nothing."""
        for box in array.boxes:
            region = Box(box.offsets, box.lengths)
            if not region.numel:
                continue
            file = files.setdefault(box.path, len(files))
            itemsize = array.dtype.itemsize
            if _is_dense(box.lengths, box.strides):
                strides, count = None, region.numel
            else:
                spans = zip(box.lengths, box.strides, strict=True)
                strides, count = box.strides, sum((n - 1) * s for n, s in spans) + 1
            part = Part(Extent(file, box.offset, count * itemsize), array.dtype, strides)
            yield Chunk(tensor, region, (part,))

    # ---- what is no tensor ---------------------------------------------------------------

    def optimizer_state(
        self,
    ) -> tuple[
        dict[str, int | float], dict[str, dict[str, object]], dict[tuple[str, str], str], str
    ]:
        """Return steps, values that are no tensors, keys of the slots, and what counts steps."""
        steps: dict[str, int | float] = {}
        values: dict[str, dict[str, object]] = {}
        slots: dict[tuple[str, str], str] = {}
        kinds: dict[str, None] = {}
        for (name, slot), key in self.keys.state.items():
            array = self.stored.arrays.get(key)
            counts = slot == STEP and (array is None or _is_number(array))
            if array is not None and not counts:
                slots[name, slot] = key
                continue
            value = self.value(key)
            if counts and isinstance(value, (int, float)) and not isinstance(value, bool):
                steps[name] = int(value) if float(value).is_integer() else value
                kinds[PLAIN_STEP if array is None else array.dtype.name] = None
            else:
                values.setdefault(name, {})[slot] = value
        trained = {name for name, _ in slots}
        for name in steps:
            if name not in trained:
                values.setdefault(name, {})
        return steps, values, slots, next(iter(kinds), Naming().step)

    def objects(
        self,
        sidecar: Sidecar,
        steps: Mapping[str, int | float],
        values: Mapping[str, Mapping[str, object]],
        step_kind: str,
    ) -> dict[str, object]:
        """Return everything that is no tensor."""
        objects: dict[str, object] = dict(sidecar.objects)
        objects["topology"] = {"dp": sidecar.ranks or self.stored.ranks}
        objects["layout"] = (LAYOUT,)
        if steps:
            counts = set(steps.values())
            objects[STEP] = counts.pop() if len(counts) == 1 else dict(steps)
        if values:
            objects["state_values"] = values
        groups = read_groups(self.keys, self.value, self.notes)
        if groups:
            objects["param_groups"] = groups
            mode = adam_w_mode(groups)
            if mode is not None:
                objects.setdefault("adam_w_mode", mode)
        if sidecar.layout is not None:
            objects["sharded_layout"] = sidecar.layout
        if sidecar.digests is not None:
            objects["digests"] = sidecar.digests
        others = dict(self.others())
        naming = self.keys.naming
        naming = replace(naming, step=step_kind)
        carried: dict[str, object] = {
            name: CarriedDocument(document) for name, document in sidecar.carried.items()
        }
        carried[FORMAT] = DcpState(naming, others, objects.get(STEP))
        objects["carried"] = carried
        objects["unconverted"] = tuple(others)
        return objects

    def others(self) -> Iterator[tuple[str, Other]]:
        """Yield what was saved beside model and optimizer, as far as it can be carried."""
        for key in self.keys.others:
            try:
                tree = self.other(key)
            except UnsupportedError as error:
                self.notes.append(f"not carried: {error}")
                continue
            try:
                encode(tree, where=key)
            except FormatError as error:
                self.notes.append(f"not carried: {error}")
                continue
            if not is_plain(tree):
                self.notes.append(f"not carried: {key}: it is no plain data")
                continue
            yield key, Other(self.stored.paths.get(key, (key,)), tree)

    def other(self, key: str) -> object:
        """Return an object, or a small tensor with its bytes."""
        array = self.stored.arrays.get(key)
        if array is None:
            return read_object(self.path, key, self.stored.objects[key])
        whole = Box.whole(array.shape)
        size = whole.numel * array.dtype.itemsize
        if size > _MAX_OTHER_BYTES:
            raise UnsupportedError(
                f"{key}: a tensor beside model and optimizer must have at most "
                f"{_MAX_OTHER_BYTES} bytes, got {size}"
            )
        values = self.array(array)
        untyped = array.dtype.torch_storage == "UntypedStorage"
        if untyped:
            raise UnsupportedError(f"{key}: a tensor beside the model must not be {array.dtype}")
        storage = StorageRef(array.dtype, whole.numel, payload=values.tobytes())
        return TensorRef(storage, 0, array.shape, row_major_strides(array.shape))

    def value(self, key: str) -> object:
        """Return an object, or a tensor of one element as a number."""
        array = self.stored.arrays.get(key)
        if array is not None:
            if not _is_number(array):
                raise UnsupportedError(
                    f"{self.path}: {key}: must be one number, got {array.dtype} {list(array.shape)}"
                )
            number: object = self.array(array).item()
            return number
        value = read_object(self.path, key, self.stored.objects[key])
        if isinstance(value, TensorRef) and value.numel == 1 and value.dtype.name in NUMBERS:
            data = np.frombuffer(value.storage.payload or b"", value.dtype.carrier)
            return data[value.offset].item()
        return value

    def array(self, array: StoredArray) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """Read a small array, every element of which must be stored."""
        kind = array.dtype.carrier
        values = np.zeros(array.shape, kind)
        seen = np.zeros(array.shape, bool)
        for box in array.boxes:
            if 0 in box.lengths:
                continue
            spans = zip(box.lengths, box.strides, strict=True)
            count = sum((n - 1) * s for n, s in spans) + 1
            with (self.path / box.path).open("rb") as file:
                file.seek(box.offset)
                data = file.read(count * kind.itemsize)
            if len(data) != count * kind.itemsize:
                raise FormatError(f"{self.path / box.path}: {array.key}: must end in the file")
            steps = tuple(stride * kind.itemsize for stride in box.strides)
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
            values[place] = np.ndarray(box.lengths, kind, data, 0, steps)
            seen[place] = True
        if not seen.all():
            raise FormatError(f"{self.path}: {array.key}: must be stored in full, got a part of it")
        return values


def _is_number(array: StoredArray) -> bool:
    return Box.whole(array.shape).numel == 1 and array.dtype.name in NUMBERS


def _is_dense(lengths: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Say whether a box of these strides is one run of elements in row-major order."""
    expected = 1
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
