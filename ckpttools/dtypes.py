"""How is an element stored? One table of dtypes with each ecosystem's spelling.

numpy has no bfloat16 and no float8; such elements travel as unsigned integers of the same
width (``numpy`` below), which is all that copying bit for bit needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckpttools.errors import FormatError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    ``name`` is torch's short name, ``numpy`` the dtype that carries its bits, ``safetensors``
    the spelling in a safetensors header, ``torch_storage`` the class that a torch file names
    in a persistent id.
    """

    name: str
    itemsize: int
    numpy: str
    safetensors: str
    torch_storage: str

    def __str__(self) -> str:
        return self.name

    @property
    def carrier(self) -> np.dtype[np.generic]:
        """The little-endian numpy dtype that holds the element's bits."""
        return np.dtype(self.numpy)


_TABLE = (
    DType("float64", 8, "<f8", "F64", "DoubleStorage"),
    DType("float32", 4, "<f4", "F32", "FloatStorage"),
    DType("float16", 2, "<f2", "F16", "HalfStorage"),
    DType("bfloat16", 2, "<u2", "BF16", "BFloat16Storage"),
    DType("float8_e4m3fn", 1, "<u1", "F8_E4M3", "UntypedStorage"),
    DType("float8_e5m2", 1, "<u1", "F8_E5M2", "UntypedStorage"),
    DType("int64", 8, "<i8", "I64", "LongStorage"),
    DType("int32", 4, "<i4", "I32", "IntStorage"),
    DType("int16", 2, "<i2", "I16", "ShortStorage"),
    DType("int8", 1, "<i1", "I8", "CharStorage"),
    DType("uint8", 1, "<u1", "U8", "ByteStorage"),
    DType("uint16", 2, "<u2", "U16", "UntypedStorage"),
    DType("uint32", 4, "<u4", "U32", "UntypedStorage"),
    DType("uint64", 8, "<u8", "U64", "UntypedStorage"),
    DType("complex64", 8, "<c8", "C64", "ComplexFloatStorage"),
    DType("bool", 1, "|b1", "BOOL", "BoolStorage"),
)

BY_NAME = {dtype.name: dtype for dtype in _TABLE}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE}
BY_TORCH_STORAGE = {d.torch_storage: d for d in _TABLE if d.torch_storage != "UntypedStorage"}


def dtype(name: str) -> DType:
    """Return the dtype that torch calls ``name``.

    >>> dtype("bfloat16").itemsize
    2

    Raises:
        FormatError: no such dtype is known.
    """
    try:
        return BY_NAME[name]
    except KeyError:
        raise FormatError(f"dtype must be one of {', '.join(BY_NAME)}, got {name!r}") from None
