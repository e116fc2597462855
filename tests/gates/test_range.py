"""A range is parsed, checked, printed and read back in one place."""

import pytest

from loragate.errors import ConfigError
from loragate.gates.range import GRID, Range, parse_ranges


@pytest.mark.parametrize("one", [*GRID, Range(-0.1, 1.0000001), Range(-1e-7, 1.5)], ids=str)
def test_what_is_printed_or_typed_is_read_back(one):
    assert Range.parse(str(one)) == one == Range.parse(one.cli_text)
    assert one.slug not in {other.slug for other in GRID if other != one}


def test_minus_zero_is_zero():
    assert str(Range(-0.0, 1)) == "[0,1]"


def test_the_grid_is_the_papers():
    assert parse_ranges("grid") == GRID
    assert len(set(GRID)) == 42
    assert {one.lower for one in GRID} == {-6, -5, -4, -3, -2, -1, 0}
    assert {one.upper for one in GRID} == {1, 2, 3, 4, 5, 6}


def test_ranges_are_read():
    assert parse_ranges("-3,1;0,1; [-6, 3]") == (Range(-3, 1), Range(0, 1), Range(-6, 3))
    assert parse_ranges("-0,1;") == (Range(0, 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("gird", "two numbers L,U.* found 'gird'"),
        ("-3,1;0", "two numbers L,U.* found '0'"),
        ("-3,1,0,1", "two numbers"),
        ("1,-3", "wrong way round"),
        ("0.5,1", "lower bound must be"),
        ("0,nan", "must be a finite number"),
        ("0,1;-3,1;0,1.0", "0,1.0 stands there twice"),
    ],
)
def test_what_is_no_range_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_ranges(text)
