"""Classes of tokens."""

import pytest

from loragate.analysis.token_classes import CLASSES, TokenClasses, class_of_text
from loragate.world.tokenizer import build_tokenizer, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 12", "digits"),
        ("+", "operators"),
        (" ≤", "operators"),
        ("don't", "words"),
        ("Ärger", "words"),
        ("x2", "mixed"),
        ("}$", "punctuation"),
        ("\n\n", "space"),
        ("", "mixed"),
        ("\ufffd", "mixed"),
        ("\\frac", "mixed"),
        ("数", "words"),
    ],
)
def test_text(text, expected):
    assert class_of_text(text) == expected


def test_every_token_of_the_tiny_world():
    tokenizer = build_tokenizer()
    classes = TokenClasses(tokenizer, {tokenizer.eos_token_id})
    named = {word: classes.name(index) for index, word in enumerate(words())}
    assert named["<eos>"] == "end"
    assert named["<pad>"] == "special"
    assert {named[digit] for digit in "0123456789"} == {"digits"}
    assert {named[operator] for operator in ("+", "-", "*", "=")} == {"operators"}
    assert named["answer"] == "words"
    assert set(named.values()) <= set(CLASSES)
    assert classes.indices([1, 5]).tolist() == [CLASSES.index("end"), CLASSES.index("digits")]
