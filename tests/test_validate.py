"""One validator: strict about kinds, keys and figures; one sentence for what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Len

from loragate.errors import ArtifactError, ConfigError
from loragate.validate import check_fields, coerce_fields, validate


@dataclass(frozen=True)
class Inner:
    samples: Annotated[int, Ge(1)]
    temperature: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, Len(1)]
    inner: Inner
    counts: dict[int, float] | None = None
    modules: str | list[str] | None = None
    schedule: Literal["cosine", "linear"] = "cosine"
    several: tuple[Inner, ...] = ()

    def __post_init__(self) -> None:
        if self.name == "both":
            raise ConfigError("name and inner do not go together")


GOOD: dict[str, Any] = {"name": "a", "inner": {"samples": 2}}


def test_a_value_is_built_with_lists_as_tuples_and_whole_numbers_as_numbers() -> None:
    given = {
        "inner": {"samples": 2, "temperature": 1, "stop": ["x"]},
        "counts": {"3": 1},
        "several": [{"samples": 1}],
        "modules": ["q"],
    }
    assert validate(Outer, {**GOOD, **given}, "f.yaml") == Outer(
        "a", Inner(2, 1.0, ("x",)), {3: 1.0}, ["q"], "cosine", (Inner(1),)
    )
    assert isinstance(validate(Inner, {"samples": 1, "temperature": 1}, "f").temperature, float)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, ["name must be text", "found 3"]),
        ({"name": True}, ["quotes"]),
        ({"name": ""}, ["not empty"]),
        ({"inner": {"samples": True}}, ["inner.samples must be a whole number", "True"]),
        ({"inner": {"samples": 1.0}}, ["inner.samples must be a whole number"]),
        ({"inner": {"samples": 0}}, ["inner.samples must be at least 1", "found 0"]),
        ({"inner": {"samples": 1, "temperature": float("nan")}}, ["inner.temperature must be a finite number"]),
        ({"inner": {"samples": 1, "temperature": "1"}}, ["inner.temperature must be a number", "'1'"]),
        ({"inner": {"sample": 1}}, ["unknown key 'inner.sample'", "did you mean 'samples'"]),
        ({"inner": {}}, ["the key 'inner.samples' is missing"]),
        ({"inner": 3}, ["inner must be a block of keys"]),
        ({"several": [{"samples": 1}, {"samples": 1, "stopp": []}]}, ["'several[1].stopp'", "did you mean 'stop'"]),
        ({"modules": 3}, ["modules must be text or a list", "found 3"]),
        ({"counts": {"x": 1}}, ["counts.x must be a whole number"]),
        ({"schedule": "cosin"}, ["schedule must be one of", "did you mean 'cosine'"]),
        ({"shedule": "cosine"}, ["unknown key 'shedule'", "did you mean 'schedule'"]),
        ({"name": "both"}, ["do not go together"]),
        ({"counts": {(1, 2): 1}}, ["key"]),
    ],
)
def test_what_is_wrong_is_said_with_place_key_and_value(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ArtifactError) as error:
        validate(Outer, {**GOOD, **change}, "f.json", ArtifactError)
    assert str(error.value).startswith("f.json: ")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_what_is_no_block_of_keys_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml: expected a block of keys"):
        validate(Outer, value, "f.yaml")


def test_other_annotations_than_dataclasses_are_checked_too() -> None:
    assert validate(tuple[int, ...], [1, 2], "here") == (1, 2)
    with pytest.raises(ConfigError, match=r"here: \[1\] must be a whole number"):
        validate(tuple[int, ...], [1, "b"], "here")


def test_a_python_caller_is_told_the_field() -> None:
    check_fields(Inner(1, 1, ("x",)))
    with pytest.raises(ConfigError, match=r"^samples must be at least 1, found 0"):
        check_fields(Inner(0))
    with pytest.raises(ConfigError, match="temperature must be a finite number"):
        check_fields(Inner(1, float("inf")))


@dataclass(frozen=True)
class Options:
    rate: float = 0.1
    max_rows: int = 5
    label: str = ""
    ranges: str = ""
    seed: int | None = 3
    words: tuple[str, ...] = ()
    fast: bool = False
    constants: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"rate": "1e-4"}, {"rate": 1e-4}),
        ({"max-rows": 2e4}, {"max_rows": 20_000}),
        ({"max_rows": "7"}, {"max_rows": 7}),
        ({"label": 12}, {"label": "12"}),
        ({"ranges": [[-3, 1], [0, 1]]}, {"ranges": "-3,1;0,1"}),
        ({"ranges": ["q_proj", "v_proj"]}, {"ranges": "q_proj,v_proj"}),
        ({"rate": None, "seed": None}, {"seed": None}),
        ({"words": ["a", "b"]}, {"words": ("a", "b")}),
        ({"constants": {"threshold": 0.1}}, {"constants": {"threshold": 0.1}}),
    ],
)
def test_a_person_may_write_numbers_and_lists_as_texts(given: dict[str, Any], values: dict[str, Any]) -> None:
    found = coerce_fields(Options, given, "--config f.yaml")
    assert found == values
    assert [type(value) for value in found.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_row": 1}, "did you mean 'max_rows'"),
        ({"max_rows": 1.5}, "max_rows must be a whole number, found 1.5"),
        ({"max_rows": True}, "max_rows must be a whole number, found True"),
        ({"rate": "fast"}, "rate must be a number, found 'fast'"),
        ({"rate": "inf"}, "rate must be a finite number"),
        ({"fast": "yes"}, "fast must be true or false"),
        ({"fast": 1}, "fast must be true or false"),
        ({"label": True}, "quotes"),
        ({"words": "a"}, "words must be a list"),
        ({"words": [1]}, "words[0] must be text"),
        ({"constants": 3}, "constants must be a block of keys"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        coerce_fields(Options, given, "--config f.yaml")
    assert str(error.value).startswith("--config f.yaml: ")
    assert words in str(error.value)
