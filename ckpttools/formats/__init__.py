"""Which checkpoint formats are there? One registry line each, one Protocol for all.

A format turns files into Manifests (:meth:`Format.read`), without reading tensor bytes, and a
Manifest into the layout of files that don't exist yet (:meth:`Format.lay_out`). No format
imports another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from ckpttools.errors import UsageError
from ckpttools.manifest import Extent, Manifest

ACCEPTABLE_LOSSES = frozenset({"optimizer", "extra_state", "bias_correction"})
"""What a user may allow to be lost.

All optimizer state; modules' extra state (fp8 scales); that bias correction was off.
"""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a user may have to tell a reader: facts that the files don't hold.

    ``layout`` names the layout variant, ``rules_path`` replaces the built-in rules,
    ``vocab_size`` is the true number of vocabulary rows, ``accept_loss`` names what may be lost.
    ``names_path`` is a JSON file with the parameters' names where a file has only their numbers,
    ``model_path`` a file with the model's weights by name. ``adam_w_mode`` says whether weight
    decay was decoupled (AdamW) or added to the gradient (L2).
    """

    layout: str | None = None
    rules_path: str | None = None
    vocab_size: int | None = None
    accept_loss: frozenset[str] = frozenset()
    names_path: str | None = None
    model_path: str | None = None
    adam_w_mode: bool | None = None

    def __post_init__(self) -> None:
        if unknown := self.accept_loss - ACCEPTABLE_LOSSES:
            raise UsageError(
                f"--accept-loss: must be one of {', '.join(sorted(ACCEPTABLE_LOSSES))}, got "
                f"{min(unknown)}"
            )


@dataclass(frozen=True, slots=True)
class Target:
    """The topology to write. None means: as in the source.

    ``world`` is the number of ranks, from which the data-parallel size follows. ``bucket_size``
    counts elements; "none" asks for one bucket. ``vpp`` is the number of model chunks of a stage;
    where ``pp`` changes and it isn't named, there is one. ``first_stage_layers`` and
    ``last_stage_layers`` are those of uneven stages. ``masters`` says how the run that will load
    the files keeps the masters of bfloat16 weights: ``stored`` as float32, or as ``remainders``
    beside the weights, which then must be the masters rounded half away from zero. ``accept_loss``
    names what the target need not hold.
    """

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    dp: int | None = None
    world: int | None = None
    bucket_size: int | Literal["none"] | None = None
    masters: Literal["stored", "remainders"] | None = None
    accept_loss: frozenset[str] = frozenset()

    def rank_count(self, source: Manifest, to: str) -> int:
        """Return the number of ranks where that is all there is to name: else as in the source.

        ``to`` names what is written, for errors.

        Raises:
            UsageError: something else was named, or two numbers.
        """
        for name in _CUTS:
            value = getattr(self, name)
            if value not in (None, 1) or (value == 1 and name not in ("tp", "pp", "vpp")):
                option = name.replace("_", "-")
                raise UsageError(
                    f"--{option}: must not be given for {to}, which any layout loads, got {value}"
                )
        topology = source.objects.get("topology")
        known = prod(topology.values()) if isinstance(topology, Mapping) else 1
        sizes = {size for size in (self.dp, self.world) if size is not None} or {known}
        if len(sizes) > 1 or min(sizes) < 1:
            shown = " and ".join(map(str, sorted(sizes)))
            raise UsageError(f"--world: must be one number of ranks, at least 1, got {shown}")
        return sizes.pop()


_CUTS = ("tp", "pp", "vpp", "first_stage_layers", "last_stage_layers", "bucket_size", "masters")
"""What a :class:`Target` names beside a number of ranks."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to understand the files, under the names of the layout variants that agree on it."""

    layouts: tuple[str, ...]
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader found: the candidates, and why other variants can't be.

    ``notes`` are remarks for the report, such as files that were not read.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes for one place in a file: ``file`` is an index into the Manifest's files."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class NewFile:
    """A small file that is written whole once everything else is known."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """What is known once the payload is written.

    ``crcs`` are the CRC-32 of a draft's ``seals``; ``digests`` the CRC-32C of each tensor's
    logical bytes by (name, slot), empty unless the draft asks for them.
    """

    crcs: Sequence[int]
    digests: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Finish:
    """The last bytes: patches of the draft's files, and further small files."""

    patches: Sequence[Patch] = ()
    new_files: Sequence[NewFile] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """Files that don't exist yet: their Manifest, and the bytes that aren't tensor elements.

    ``patches`` are known now; ``finish`` gives the rest once the payload is written. ``carried``
    and ``lost`` say what of the source's other state is in the files and what is not, ``left_out``
    which tensors; ``plan`` says how the files are laid out, ``notes`` what else should be known.
    ``aliases`` are tensors that the Manifest leaves out because a reader of the files finds them
    in the bytes of others; they are compared with the source as all others are. ``source`` is the
    source as another view of the same bytes, where the files were laid out from that: rounded or
    widened by a named codec.
    """

    manifest: Manifest
    patches: tuple[Patch, ...]
    finish: Callable[[Written], Finish]
    seals: tuple[Extent, ...] = ()
    wants_digests: bool = False
    carried: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    source: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a stored file."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A parameter group: its settings, and its members by name.

    ``members`` None means that the files don't tell and no rule does.
    """

    settings: Mapping[str, object]
    members: tuple[str, ...] | None = field(default=None)


DECOUPLED = "decoupled_weight_decay"
"""torch's name, a setting of a group, for what Apex calls ``adam_w_mode``."""


def decoupled_modes(objects: Mapping[str, object]) -> frozenset[bool]:
    """Return how weight decay was done, as a Manifest's objects tell it: decoupled or not.

    ``adam_w_mode`` tells it of all parameters, else the settings of those groups that have weight
    decay; empty where nobody does, both where groups differ.
    """
    known, groups = objects.get("adam_w_mode"), objects.get("param_groups")
    if isinstance(known, bool):
        return frozenset({known})
    listed = groups if isinstance(groups, (tuple, list)) else ()
    told = [
        group.settings.get(DECOUPLED)
        for group in listed
        if isinstance(group, ParamGroup) and group.settings.get("weight_decay")
    ]
    return frozenset(value for value in told if isinstance(value, bool))


@runtime_checkable
class Carried(Protocol):
    """What a format must know of its own checkpoint to write one again, beside the tensors.

    It stands in a Manifest's objects under ``carried``, by the format's name. A format that holds
    such documents of others keeps them unread.
    """

    def to_document(self) -> object:
        """Return it as plain JSON data.

        Raises:
            UsageError: it belongs to what the document can't stand for.
        """


@dataclass(frozen=True, slots=True)
class CarriedDocument:
    """A document that another format made of its :class:`Carried`."""

    document: object

    def to_document(self) -> object:
        """Return the document."""
        return self.document


@runtime_checkable
class DescribesParts(Protocol):
    """A format that also knows files which are a part of a checkpoint and can't be read alone."""

    def describe_part(self, path: Path) -> dict[str, object] | None:
        """Describe such a file as `ckpttools.inspect` does a checkpoint; None for anything else.

        Raises:
            FormatError: it is damaged or hostile.
        """


@runtime_checkable
class Format(Protocol):
    """A checkpoint format. ``about`` is a line for people.

    ``takes`` has those of ``names_path`` and ``model_path`` that its reader can use.
    """

    name: str
    about: str
    takes: frozenset[str]

    def detect(self, path: Path) -> bool:
        """Say by names alone whether ``path`` is meant to be of this format, damaged or not."""

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Understand the files under ``path``, reading no tensor bytes.

        Raises:
            FormatError: they are damaged, incomplete or hostile.
        """

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Decide where each byte of ``source`` will go in new files under ``root``.

        Raises:
            UsageError: the target can't hold the source.
        """

    def check(self, path: Path) -> list[Problem]:
        """Check every stored byte that carries a checksum or has a fixed value."""


def registry() -> dict[str, Format]:
    """Return all formats by name."""
    from ckpttools.formats.apex import ApexFormat
    from ckpttools.formats.consolidated import ConsolidatedFormat, ZarrFormat
    from ckpttools.formats.dcp import DcpFormat
    from ckpttools.formats.megatron import MegatronFormat
    from ckpttools.formats.native import Zero1Format, Zero2Format
    from ckpttools.formats.native.chunked import ShardedFormat
    from ckpttools.formats.nemo import NemoFormat, NemoLegacyFormat

    formats: tuple[Format, ...] = (
        MegatronFormat(),
        ConsolidatedFormat(),
        ZarrFormat(),
        Zero1Format(),
        Zero2Format(),
        ShardedFormat(),
        ApexFormat(),
        NemoFormat(),
        NemoLegacyFormat(),
        DcpFormat(),
    )
    return {fmt.name: fmt for fmt in formats}
