"""What can go wrong, as types: one root, and a child for each thing a caller may act on.

Every message is one line, ``{where}: {rule}, got {value}``; an action for the reader, where
there is one, stands in ``hint``. Each child also inherits the builtin that a caller would
expect, so that ``except ValueError`` keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CkptError(Exception):
    """Root of all errors that ckpttools raises on purpose.

    ``hint`` says what to do next; it is empty where nothing can be done.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class LayoutError(CkptError, ValueError):
    """A region, mesh, rule or formula is not what it must be."""


class RuleError(LayoutError):
    """A parameter matches no rule of its model family, or several, or a rules file is none."""


class UnsupportedError(CkptError, ValueError):
    """A checkpoint is sound as far as one can see, but of a kind that isn't covered."""


class FormatError(CkptError, ValueError):
    """A file is damaged, hostile or not of the format it claims to be."""


class UnknownFormatError(CkptError, ValueError):
    """No format, or more than one, recognises a path."""


class PlanError(CkptError, ValueError):
    """A plan would lose, double or invent an element, so it was refused."""


class EvidenceError(CkptError, ValueError):
    """No formula, or more than one, agrees with what the files show."""


class AmbiguousLayoutError(EvidenceError):
    """Several formulas agree with what the files show; only the user can tell."""


class ReplicaError(CkptError, ValueError):
    """Copies that must be equal are not."""


class MismatchError(CkptError, ValueError):
    """What was written is not what was read."""


class StorageError(CkptError, OSError):
    """The operating system refused, or a place is not fit for the work."""


class UsageError(CkptError, ValueError):
    """A request contradicts itself or leaves out what only the user knows."""


class ConfigError(UsageError):
    """A setting is unknown, or not what it must be."""


class OptimizerError(CkptError, RuntimeError):
    """A sharded optimizer can't do what is asked: its parameters, ranks or order of calls."""


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise what the system refuses as StorageError; a context, or a function's decorator.

    Raises:
        StorageError: an OSError came up that is none.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        where = error.filename if error.filename is not None else "the system"
        raise StorageError(f"{where}: can't use it: {reason}") from error
