"""Which part of an answer counts as its program."""

from __future__ import annotations

import random
import time

import pytest

from loragate.evaluation.sandbox import extract_code
from loragate.evaluation.sandbox.code import cut_at_stops

F = "def f(x):\n    return x\n"
G = "def f(x):\n    return 2 * x\n"
PROMPT = 'def f(x):\n    """ Twice. """\n'


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (f"```python\n{F}```", F),
        (f"```py\n{F}```\nbetter:\n```\n{G}```", G),
        (f"```python\n{F}```\nUse it so:\n```python\nprint(f(1))\n```", F),
        (f"```python\n{F}", F),
        (f"```python\n{F}```\n```python\ndef f(x) return\n```", F),
        ("1. So:\n   ```python\n   def f(x):\n       return x\n   ```\n", F),
        (f"Here it is:\n\n{F}\nThis returns x, as wanted.", F + "\n"),
        (f"import math\n\n\n{F}", f"import math\n\n\n{F}"),
        ("@cache\n@other\ndef f(x):\n    return x\n", "@cache\n@other\ndef f(x):\n    return x\n"),
        ("T = [\n1,\n2,\n]\ndef f(x):\n    return T\n", "T = [\n1,\n2,\n]\ndef f(x):\n    return T\n"),
        ('D = """\nsome words here\n"""\ndef f(x):\n    return D\n', 'D = """\nsome words here\n"""\ndef f(x):\n    return D\n'),
        ("def f(x):\n    try:\n        return 1\n    finally:\n        pass\nSolution\n",
         "def f(x):\n    try:\n        return 1\n    finally:\n        pass\n"),
        ("f = lambda x: x", "f = lambda x: x"),
        ("No code at all, sorry.", None),
        ("Solution", None),
        ("", None),
        ("def f(x) return x", None),
    ],
    ids=range(17),
)  # fmt: skip
def test_extract(response: str, expected: str | None) -> None:
    assert extract_code(response, "f") == expected


def test_without_a_name_the_last_block_counts() -> None:
    assert extract_code(f"```\n{F}```\n```\nprint(1)\n```") == "print(1)\n"


def test_continuations_of_a_prompt() -> None:
    assert extract_code("    return 2 * x\n\n\ndef g():\n    pass", "f", PROMPT) == f"{PROMPT}    return 2 * x\n\n"
    assert extract_code("    return 2 * x\nprint(f(1))", "f", PROMPT) == f"{PROMPT}    return 2 * x"
    assert extract_code(f"```python\n{G}```", "f", PROMPT) == G
    assert extract_code("```python\n    return 2 * x\n```", "f", PROMPT) == f"{PROMPT}    return 2 * x\n"
    assert extract_code("", "f", PROMPT) is None
    assert extract_code("I do not know.", "f", PROMPT) is None


def test_stops() -> None:
    for stop in ("\nclass A", "\ndef g", "\n# x", "\nif x", "\nprint(1)"):
        assert cut_at_stops(f"    return 1{stop}") == "    return 1"
    assert cut_at_stops("    if x:\n        return 1\n    # y") == "    if x:\n        return 1\n    # y"


@pytest.mark.parametrize(
    "text",
    ["(\n" * 60_000, "def f(x):\n    return (\n" * 8_000, "words and more\n" * 14_000, '"""\n' * 50_001, "@a\n" * 60_000,
     "```\n" * 50_000,
     "[" * 150_000, "x = 1\n" * 30_000],
    ids=["brackets", "open calls", "prose", "strings", "decorators", "fences", "deep", "assignments"],
)  # fmt: skip
def test_hostile_answers_are_quick(text: str) -> None:
    before = time.process_time()
    extract_code(text, "f", PROMPT)
    assert time.process_time() - before < 4


def test_random_text_never_raises() -> None:
    rng = random.Random(0)
    pieces = ["def f(x):\n", "    return x\n", "```", "```python\n", "\n", '"""', "(", ")", "@a\n", "else:\n", "\0"]
    pieces += ["\t", "é", "x = 1\n"]
    for _ in range(300):
        code = extract_code("".join(rng.choices(pieces, k=rng.randint(0, 25))), "f", rng.choice([None, PROMPT]))
        if code is not None:
            compile(code, "x", "exec")
