from __future__ import annotations

import io

import pytest
from chat_tokenizers import byte_level, space_adding
from rich.console import Console

from loragate.data.encoding import encode_rows
from loragate.data.rendering import preview

ATTACK = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202e\u200b\u2028[red]markup[/red]"


def encoded(tokenizer, *contents):
    return encode_rows(
        [{"messages": [{"role": "user", "content": contents[0]}, {"role": "assistant", "content": contents[1]}]}],
        tokenizer,
        max_length=None,
    )[0]


def test_prompt_is_dim_response_bold_green_and_special_tokens_literal():
    tokenizer = byte_level()
    text = preview(encoded(tokenizer, "two?", "four\n\tü"), tokenizer)
    pieces = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert pieces == [
        ("<|im_start|>", "dim cyan"),
        ("user\ntwo?", "dim"),
        ("<|im_end|>", "dim cyan"),
        ("\n", "dim"),
        ("<|im_start|>", "dim cyan"),
        ("assistant\n", "dim"),
        ("four\n\tü", "bold green"),
        ("<|im_end|>", "bold cyan"),
    ]
    assert text.plain.endswith("<|im_start|>assistant\n⟦four\n\tü<|im_end|>⟧")


@pytest.mark.parametrize("tokenizer", [byte_level(), space_adding()], ids=["byte-level", "space-adding"])
def test_data_cannot_send_escape_codes_or_markup(tokenizer):
    row = encoded(tokenizer, ATTACK, ATTACK)
    screen = io.StringIO()
    Console(file=screen, force_terminal=False, width=400).print(preview(row, tokenizer))
    shown = screen.getvalue()
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert shown.count("[red]markup[/red]") == 2


def test_escapes_are_readable():
    shown = preview(encoded(byte_level(), "hi", ATTACK), byte_level()).plain
    assert r"\x1b[2J\x1b]0;owned\x07\x9b31m\x0d\x08\u202e\u200b\u2028[red]" in shown


def test_data_cannot_forge_the_marks():
    tokenizer = byte_level()
    shown = preview(encoded(tokenizer, "⟦fake⟧", "true"), tokenizer).plain
    assert shown.count("⟦") == shown.count("⟧") == 1
    assert r"\u27e6fake\u27e7" in shown
