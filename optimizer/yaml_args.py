"""What does a YAML configuration say, as the namespace that a training script's arguments are?

The file is one mapping. A value that is itself a mapping is a section, and its keys join those of
the other sections in one flat namespace, as a command line's would. Keys of the section
``optimizer``, and those outside any section, must be settings of `OptimizerConfig` or Megatron's
names for them, so a misspelled one is an error; other sections (model, training, data) may hold
anything, settings too. Only plain YAML is read: no tag makes an object.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Final

from ckpttools.errors import ConfigError, UnsupportedError, system_errors
from ckpttools.optimizer.config import (
    ARGUMENT_NAMES,
    SETTING_NAMES,
    check_setting,
    unknown_setting,
)

_OPTIMIZER_SECTION: Final = "optimizer"

# A float as YAML 1.2's core schema has it. PyYAML follows 1.1, where 1e-8 is a string.
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


def parse_yaml_args(path: str | os.PathLike[str]) -> argparse.Namespace:
    """Read a YAML file; set attributes on the result, then `OptimizerConfig.from_args` takes it.

    The namespace holds what the file says and no defaults. Settings of the optimizer have their
    own type, and null is kept as None, which counts as not given.

    Raises:
        ConfigError: the file is not YAML or not such a mapping; a key stands twice, or in two
            sections with two values; an optimizer's setting is unknown or out of its range.
        StorageError: the file can't be read.
        UnsupportedError: PyYAML is not installed.
    """
    where = os.fspath(path)
    document = _load(where)
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: must be a mapping, got {_kind(document)}")
    found: dict[str, object] = {}
    for key, value, checked in _entries(where, document):
        setting = ARGUMENT_NAMES.get(key, key)
        if setting in SETTING_NAMES:
            kept = None if value is None else check_setting(where, setting, value)
        elif checked:
            raise unknown_setting(where, key)
        else:
            kept = value
        if key in found and found[key] != kept:
            raise ConfigError(
                f"{where}: {key} must have one value, got {found[key]!r} and {kept!r}"
            )
        found[key] = kept
    return argparse.Namespace(**found)


def _entries(where: str, document: dict[object, object]) -> Iterator[tuple[str, object, bool]]:
    """Yield each key with its value, and whether it must be a setting of the optimizer."""
    for name, value in document.items():
        if not isinstance(value, dict):
            yield _name(where, name), value, True
            continue
        for key, item in value.items():
            yield _name(where, key), item, name == _OPTIMIZER_SECTION


def _name(where: str, key: object) -> str:
    if not isinstance(key, str) or not key.isidentifier():
        raise ConfigError(f"{where}: a key must be a name as Python's are, got {key!r}")
    return key


def _kind(document: object) -> str:
    return "nothing" if document is None else type(document).__name__


def _load(where: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise UnsupportedError(
            f"{where}: reading YAML needs PyYAML, got {error}",
            hint="pip install 'ckpttools[torch]'",
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
        """PyYAML's safe loader, that refuses a key given twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            keys: list[object] = []
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            for key_node, _ in pairs:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue  # `<<: *base` may stand beside keys that it also has
                key = self.construct_object(key_node, deep=True)
                if key in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} stands twice", key_node.start_mark
                    )
                keys.append(key)
            mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
            return mapping

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    with system_errors():
        data = Path(where).read_bytes()
    try:
        return yaml.load(data, Loader=Loader)  # noqa: S506  # a subclass of the safe loader
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: must be plain YAML, got {_problem(error)}") from error
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: must be plain YAML, got {error}") from error


def _problem(error: Exception) -> str:
    """Say in one line what PyYAML says in several: the problem, and where it is."""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    mark = getattr(error, "problem_mark", None)
    return f"{problem}, line {mark.line + 1}" if mark is not None else problem
