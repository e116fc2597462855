from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loragate.printable import escape_controls, excerpt


@given(st.text())
def test_escaped_text_holds_no_character_that_acts(text):
    assert all(char.isprintable() or char.isspace() for char in escape_controls(text))
    assert not set(escape_controls(text)) & {"\n", "\r", "\t", "\x1b", "\x0b", "\x85", "\u2028", "\u202e"}


def test_ordinary_text_stays():
    assert escape_controls("naïve – 数学 ✓ a\u00a0b") == "naïve – 数学 ✓ a\u00a0b"
    assert escape_controls("a\nb\tc", keep="\n") == r"a" + "\n" + r"b\x09c"
    assert escape_controls("\U000e0041\ud800") == r"\U000e0041\ud800"


def test_excerpt_is_cut_and_quoted():
    assert excerpt("  short\n") == "'short'"
    assert excerpt("x" * 100, 10) == "'" + "x" * 9 + "…'"
