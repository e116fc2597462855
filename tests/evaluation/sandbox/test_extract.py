"""Which part of an answer counts as its program."""

from __future__ import annotations

import random
import time

import pytest

from loragate.evaluation.sandbox import extract_code
from loragate.evaluation.sandbox.extract import cut_at_stops

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


H = "def twice(x):\n    return 2 * x\n"
USES = "def f(x):\n    return twice(x)\n"
FENCED = 'def f(x):\n    """Twice.\n\n{0}```python\n{0}f(1)\n{0}```\n    """\n    return 2 * x\n'
RIGHT = {
    # a fence is closed that the prompt had opened, or twice
    "stray end": f"{G}```\n",
    "stray end, prose before": f"Here is the code:\n\n{G}```\nDone.",
    "stray end, an example after": f"{G}```\nUse it so:\n```python\nprint(f(1))\n```\nThat is all.",
    "stray end, a bare example after": f"{G}```\nIt prints:\n```\n2\n```\n",
    "ended twice": f"An example:\n```\n2\n```\n```\nAnd the code:\n```python\n{G}```\n",
    "stray end, completion": "    return 2 * x\n```\nIt doubles.\n",
    "stray end, completion, an example after": "    return 2 * x\n```\nSo:\n```python\nprint(f(1))\n```\n",
    "stray tildes": f"{G}~~~\n",
    # cut off in tests of its own
    "cut in an assert": f"Sure:\n```python\n{G}\n# tests\nassert f(1) == 2\nassert f([",
    "cut in a number": f"```python\n{G}\nassert f(10) == 2",
    "cut in a name": f"```python\n{G}\nassert f(1) == 2\nasse",
    "cut in a test class": f"```python\n{G}\nclass Test(unittest.TestCase):\n    def test(self):\n        self.",
    "cut in a main block": f"```python\n{G}\nif __name__ == '__main__':\n    print(f(",
    "cut in a loop": f"```python\n{G}\nfor value in (1, 2):\n    prin",
    "cut in a string": f"```python\n{G}\nprint(\'\'\'The value\nis",
    "cut without a fence": f"The function:\n\n{G}\nassert f(1) == 2\nassert f(1",
    "cut after a fence": f"```python\n{G}```\nTests:\n```python\nassert f(1",
    "no end, prose after": f"```python\n{G}\nThis doubles x.\nIt is quick.\n",
    "cut completion": "    return 2 * x\n\nassert f(",
    "completion, prose after": "    return 2 * x\n\nThis doubles x.\nIt is quick.",
    "completion, a special token": "    return 2 * x\n<|endof",
    "a special token on the line": "    return 2 * x<|im_end|>",
    "the end of a sequence": f"```python\n{G}```</s>",
    # fences in docstrings
    "fence in a docstring": f"```python\n{FENCED.format('    ')}```",
    "fence in a docstring at the margin": f"```python\n{FENCED.format('')}```\nDone.",
    "fence in a docstring, tests after": f"```python\n{FENCED.format('')}```\n```python\nassert f(1) == 2\n```",
    "fence in a comment's block": f"````python\n{FENCED.format('')}````",
    "one fence in a docstring": '```python\ndef f(x):\n    r\'\'\'Twice.\n```\n    \'\'\'\n    return 2 * x\n```',
    "fence in a string": "```python\ndef f(x):\n    note = \"\"\"\n```\n\"\"\"\n    return 2 * x\n```",
    # helpers in other blocks
    "helper first": f"```python\n{H}```\nand then\n```python\n{USES}```",
    "helper last": f"```python\n{USES}```\nwith\n```python\n{H}```",
    "import first": "```python\nimport math\n```\n```python\ndef f(x):\n    return int(math.ldexp(x, 1))\n```",
    "all names of a module": "```python\nfrom operator import *\n```\n```python\ndef f(x):\n    return add(x, x)\n```",
    "constant first": "```python\nTWO = 2\n```\n```python\ndef f(x):\n    return TWO * x\n```",
    "helper of a helper": f"```python\nimport operator\ndef two(x): return operator.add(x, x)\n```\n"
    f"```python\ndef twice(x): return two(x)\nprint(twice('a'))\n```\n```python\n{USES}```",
    "helper, cut in tests": f"```python\n{H}```\n```python\n{USES}\nassert f(",
    "base class first": "```python\nclass A:\n    n = 2\n```\n```python\ndef f(x):\n    return A.n * x\n```",
    # marks on the line of the code
    "begin and done": f"[BEGIN] {G}[DONE]",
    "done on the line": "[BEGIN]\ndef f(x):\n    return 2 * x [DONE]",
    "a tag": f"<code>{G}</code>\nDone.",
}  # fmt: skip


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_a_right_program_is_found(answer: str) -> None:
    code = extract_code(answer, "f", PROMPT)
    assert code is not None
    names: dict[str, object] = {}
    exec(code, names)
    assert names["f"](21) == 42, code


WRONG = {
    "cut in the function": "```python\ndef f(x):\n    return 2 *",
    "cut in the function, without a fence": "def f(x):\n    y = (2,\n",
    "cut in a completion": "    return 2 *",
    "cut in a docstring": '```python\ndef f(x):\n    """Twice.\n\n    ```\n    x * 2\n',
    "a block that does not compile": f"```python\n{H}def f(x) return twice(x)\n```",
    "an aside beside a broken block": f"First I had\n\n{G}\nbut better:\n```python\ndef f(x):\n    retrun 2 * x\n```",
    "only a helper": f"```python\n{H}```",
    "prose": "def f is what you want; it doubles.",
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_nothing_is_repaired(answer: str) -> None:
    code = extract_code(answer, "f", PROMPT)
    names: dict[str, object] = {}
    exec(code or "f = str", names)
    assert names.get("f", str)(21) != 42


def test_the_last_attempt_counts() -> None:
    assert extract_code(f"```python\n{G}```\nNo, this:\n```python\n{F}\nassert f(", "f") == F + "\n"
    both = extract_code(f"```\n{H}```\n```\ndef twice(x):\n    return x\n```\n```\n{USES}```", "f")
    assert both is not None
    assert "2 * x" not in both


def test_required_names_come_from_other_blocks() -> None:
    code = extract_code(f"```\nclass A:\n    pass\n```\n```\n{F}```", "f", required=("A", "f"))
    assert code is not None
    assert code.startswith("class A")
