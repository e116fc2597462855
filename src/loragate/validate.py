"""From what a file or a caller gave to a checked value, in one way: settings, task files, recipes, the artifact, records.

A class of settings is a frozen dataclass whose annotations say what a field may hold: `Annotated[int, Ge(1)]`,
`Literal["cosine", "linear"]`, `tuple[str, ...]`, another dataclass. pydantic checks them, strictly: true is no number, 3 is
no text, 1.5 is no whole number, NaN and infinity are no figures, a key that no field has is an error. pydantic is imported
when the first value is checked, so that `--help` does without it.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, NotRequired, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from loragate.errors import ConfigError, LoragateError, nearest

T = TypeVar("T")
PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Port = Annotated[int, Ge(0), Le(65535)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(2**32)]  # what every generator of random numbers takes
UnitInterval = Annotated[float, Ge(0), Le(1)]
STRICT = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
"""What holds for a dataclass; one that sets `__pydantic_config__` to {**STRICT, "extra": "ignore"} passes over other keys."""

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a block of keys",
    "dataclass_type": "a block of keys",
    "none_required": "null",
    "greater_than": "above {gt:.12g}",
    "greater_than_equal": "at least {ge:.12g}",
    "less_than": "below {lt:.12g}",
    "less_than_equal": "at most {le:.12g}",
    "string_too_short": "a text that is not empty",
    "too_short": "a list of at least {min_length}",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "literal_error": "one of {expected}",
}
_MISSING = ("missing", "missing_argument")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def validate(kind: type[T], value: Any, where: str, error: type[LoragateError] = ConfigError, remedy: str = "") -> T:
    """An instance of `kind` out of what YAML or JSON gave.

    Args:
        kind: a dataclass, or any other annotation. Its tuples are lists in the file, its whole-number keys are texts.
        value: mappings with the names of the fields, lists, texts, numbers, booleans and None.
        where: the file, or the file and key; opens every error message.
        error: what is raised.
        remedy: what to do about it; closes the message.

    Raises:
        error: naming the key, what was found and what was expected; for an unknown key also the nearest known one.
    """
    try:
        if not dataclasses.is_dataclass(kind):
            return typing.cast(T, _checked(kind, value))
        # JSON would turn a list or a text into an error about keys
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected a block of keys, found {value!r:.80}")
        return kind(**_checked(kind, value))  # whose __post_init__ has rules over several fields
    except LoragateError as broken:  # the validator's, or that of a rule over several fields
        raise error(f"{where}: {broken}{remedy and f'; {remedy}'}") from None


def coerce_fields(kind: type, values: Mapping[Any, Any], where: str = "") -> dict[str, Any]:
    """The fields of a dataclass that a person wrote into a YAML file or on a command line, as far as there are any.

    A dash in a key is an underscore. A number may stand in quotes (YAML 1.1 reads 1e-4 as text) and a text may look like a
    number. A text that is a list (of names, of ranges) may be written as a YAML list, a block of keys as a JSON text. A key
    without a value keeps the field's default, or is None where the field can be that.

    Raises:
        ConfigError: naming the key, what was found and what was expected, and the nearest known key.
    """
    hints = _hints(kind)
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        arms = _union_members(hints.get(name, Any))
        if value is not None or type(None) in arms:
            given[name] = _coerce_value(value, arms[0])
    try:
        return typing.cast(dict[str, Any], _checked(kind, given, partial=True))
    except ConfigError as broken:
        raise ConfigError(f"{where}: {broken}" if where else str(broken)) from None


def comma_list(text: str) -> list[str]:
    """The parts of a value that is a list separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def check_fields(instance: Any, error: type[LoragateError] = ConfigError) -> None:
    """Refuse a dataclass whose values its annotations do not allow; for `__post_init__` of what Python callers construct.

    Raises:
        error: beginning with the field, what was found and what was expected.
    """
    from pydantic import ValidationError

    kind: Any = type(instance)
    values = {name: getattr(instance, name) for name in _hints(kind)}
    try:
        _adapter(kind).validate_python(values)
    except ValidationError as found:
        raise error(_sentence(found.errors(), kind, values)) from None


def _checked(kind: Any, value: Any, partial: bool = False) -> Any:
    """`value` as `kind`; the fields of a dataclass as a dictionary. Raises ConfigError."""
    from pydantic import ValidationError

    try:
        # pydantic's strict reading of JSON takes lists for tuples, which its strict reading of objects does not;
        # `default`: a date, as YAML makes one, is a text again
        return _adapter(kind, partial).validate_json(json.dumps(value, default=str))
    except TypeError:
        raise ConfigError("every key must be a text or a number") from None
    except ValidationError as found:
        raise ConfigError(_sentence(found.errors(), kind, value)) from None


@cache
def _adapter(kind: Any, partial: bool = False) -> Any:
    """The validator of an annotation, or of the fields of a dataclass: its own `__post_init__` stays out of it."""
    from pydantic import ConfigDict, TypeAdapter
    from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12

    if not dataclasses.is_dataclass(kind):
        return TypeAdapter(kind, config=typing.cast(ConfigDict, STRICT))
    nothing = dataclasses.MISSING
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is nothing and field.default_factory is nothing and not partial
    }
    # a dictionary type with the fields as keys: the dataclass itself would be built, and its __post_init__ run, by pydantic
    hints = {name: hint if name in required else NotRequired[hint] for name, hint in _hints(kind).items()}
    keys = typing.cast(Any, TypedDict)("keys", hints)
    # the dataclasses inside inherit it
    keys.__pydantic_config__ = getattr(kind, "__pydantic_config__", STRICT)
    return TypeAdapter(keys)


def _hints(kind: Any) -> dict[str, Any]:
    """{field: annotation} of the keys of a dataclass; a field whose metadata say key=False is no key of a file."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.metadata.get("key", True)}


def _union_members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, without their constraints."""
    if typing.get_origin(hint) is typing.Annotated:
        return _union_members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(arm for one in typing.get_args(hint) for arm in _union_members(one))
    return (hint,)


def _coerce_value(value: Any, kind: Any) -> Any:
    """A value of a YAML file in the kind that its field has, where it can be meant so; otherwise as it is."""
    if kind in (int, float) and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value  # pydantic says what is wrong with it
    if typing.get_origin(kind) is dict and isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str or typing.get_origin(kind) is typing.Literal:
        if isinstance(value, list):
            parts = [",".join(map(str, part)) if isinstance(part, list) else str(part) for part in value]
            # a list of ranges, whose parts have commas of their own
            return (";" if any("," in part for part in parts) else ",").join(parts)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return value


def _sentence(errors: Sequence[Any], kind: Any, value: Any) -> str:
    """The first of pydantic's errors in our words; a misspelt key comes before the one that is missing for it."""
    first = min(errors, key=lambda one: one["type"] not in _UNKNOWN)
    path = _path(first, value)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if first["type"] in _UNKNOWN:
        known = _keys(kind, path[:-1])
        return f"unknown key '{place}'{nearest(str(path[-1]), known) or ';'} known are {', '.join(known)}"
    if first["type"] in _MISSING:
        return f"the key '{place}' is missing"
    # the members of a union fail one by one, at the same place
    there = [one for one in errors if _path(one, value) == path and (one is first or one["input"] == first["input"])]
    expected = " or ".join(dict.fromkeys(_expected(one) for one in there))
    found = repr(first["input"])
    found = found if len(found) <= 80 else f"{found[:79]}…"
    hint = ""
    if first["type"] == "literal_error":
        hint = nearest(
            str(first["input"]), str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        )
    elif first["type"] == "string_type" and isinstance(first["input"], bool):
        hint = " (YAML reads yes, no, on and off as true and false; put them in quotes)"
    return f"{place or 'it'} must be {expected}, found {found}{hint}"


def _expected(error: Any) -> str:
    """What one of pydantic's errors asks for."""
    context = error.get("ctx", {})
    if error["type"] == "value_error":  # raised by a type of ours
        return str(context["error"])
    known = _EXPECTED.get(error["type"])
    return known.format(**context) if known else str(error["msg"]).removeprefix("Input should be ")


def _path(error: Any, value: Any) -> tuple[Any, ...]:
    """Where an error is, as keys and indices of the value; pydantic also names the members of unions on the way."""
    path: list[Any] = []
    for at, part in enumerate(error["loc"], 1):
        # a part that is no key and no index of what was given is the name of a union's member, and left out
        if isinstance(value, Mapping):
            key = part if part in value else str(part)
            missing = error["type"] in _MISSING and at == len(error["loc"])
            if key in value or missing:
                path.append(key)
                value = value.get(key)
        elif isinstance(value, list | tuple) and isinstance(part, int):
            path.append(part)
            value = value[part]
    return tuple(path)


def _keys(kind: Any, path: Sequence[Any]) -> list[str]:
    """The keys that are known at a place: the fields of the dataclass that is read there."""
    for arm in _union_members(kind):
        if dataclasses.is_dataclass(arm) and isinstance(arm, type):
            hints = _hints(arm)
            if not path:
                return list(hints)
            return _keys(hints[path[0]], path[1:]) if path[0] in hints else []
        if path and (inside := typing.get_args(arm)):
            # the values of a mapping, the items of a list
            return _keys(inside[-1] if typing.get_origin(arm) is dict else inside[0], path[1:])
    return []
