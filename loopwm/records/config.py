"""Typed configuration: dataclasses read from YAML, with overrides from the command line.

Unknown keys and values of a wrong type are errors that name the key. An override is written `section.key=value`
with a YAML value, e.g. `optimizer.learning_rate=3e-3`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from loopwm.records.errors import InputError

BELOW_ONE = {"beta1", "beta2", "momentum", "average", "query_share", "history_share"}
"""Keys whose numbers must be below 1 in every section."""


def check_numbers(config: Any, positive: Mapping[str, Sequence[str]]) -> None:
    """Raise InputError for a number of these sections that is below zero, or zero where its key is listed."""
    for section, keys in positive.items():
        for key, value in vars(getattr(config, section)).items():
            if isinstance(value, int | float) and not (value > 0 if key in keys else value >= 0):
                bound = "be above" if key in keys else "not be below"
                raise InputError(f"{section}.{key}: must {bound} 0, got {value}")
            if key in BELOW_ONE and value >= 1:
                raise InputError(f"{section}.{key}: must be below 1, got {value}")


def typed(cls: type[T], raw: dict[str, Any], prefix: str = "") -> T:
    """Convert sections to the dataclass `cls`. Raises InputError that starts with `prefix`."""
    hints = typing.get_type_hints(cls)
    unknown = set(raw) - set(hints)
    if unknown:
        raise InputError(f"{prefix}{min(map(str, unknown))}: unknown key; known: {', '.join(sorted(hints))}")
    nothing = dataclasses.MISSING
    required = {f.name for f in dataclasses.fields(cls) if f.default is nothing and f.default_factory is nothing}
    if missing := required - set(raw):
        raise InputError(f"{prefix}{min(missing)}: missing")
    values = {key: _convert(hints[key], value, prefix + key) for key, value in raw.items()}
    try:
        return cls(**values)
    except InputError:
        raise
    except ValueError as error:  # of a section that a system brings along
        raise InputError(f"{prefix}{error}") from error


def read_sections(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file and apply `section.key=value` overrides, without further checks. Raises InputError."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a mapping of sections")
    for override in overrides:
        _apply_override(raw, override)
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise InputError(f"override {override!r}: expected section.key=value")
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise InputError(f"override {override!r}: {parent} is not a section")
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"override {override!r}: not YAML: {' '.join(str(error).split())}") from error


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Convert `value` to the annotated type. Raises InputError naming the key."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, dict):
            return typed(hint, value, f"{name}.")
        raise InputError(f"{name}: expected a section, got {value!r}")
    origin = typing.get_origin(hint)
    if origin is Literal:
        return _one_of(typing.get_args(hint), value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(typing.get_args(hint)[0], item, name) for item in value)
    if origin is dict and isinstance(value, dict):
        named, item = typing.get_args(hint)
        if item is Any:
            return value
        return {_convert(named, key, name): _convert(item, v, f"{name}.{key}") for key, v in value.items()}
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):  # YAML 1.1 reads 5e-3 as a string
            if math.isfinite(number := float(value)):
                return number
        raise InputError(f"{name}: expected a finite number, got {value!r}")
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and type(value) is hint:
        return value
    raise InputError(f"{name}: expected {getattr(hint, '__name__', hint)}, got {value!r}")


def _one_of(words: tuple[Any, ...], value: Any, name: str) -> Any:
    if isinstance(value, bool):  # YAML 1.1 reads no as False
        value = "yes" if value else "no"
    if value not in words:
        raise InputError(f"{name}: must be one of {', '.join(map(str, words))}, got {value!r}")
    return value


T = typing.TypeVar("T", bound=Any)
