"""Rows of HumanEval, HumanEval+ and MBPP (problems made up here): right answers pass, near misses do not."""

from __future__ import annotations

import pytest
from guard import need

from loragate.errors import DataError
from loragate.evaluation.sandbox import Limits, grade_code, grade_codes

TOP = "bubblewrap"


def humaneval(number: int, prompt: str, solution: str, entry: str, test: str) -> dict[str, str]:
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": prompt,
        "canonical_solution": solution,
        "test": test,
        "entry_point": entry,
    }


HUMANEVAL = [
    humaneval(
        0,
        'from typing import List\n\n\ndef largest_gap(numbers: List[float]) -> float:\n    """ Largest gap.\n'
        '    >>> largest_gap([1, 4, 6])\n    3\n    """\n',
        "    numbers = sorted(numbers)\n    return max([b - a for a, b in zip(numbers, numbers[1:])], default=0)\n",
        "largest_gap",
        "\n\nMETADATA = {'author': 'x', 'dataset': 'test'}\n\n\ndef check(candidate):\n    assert candidate([1, 4, 6]) == 3\n"
        "    assert candidate([]) == 0\n    assert candidate([9, 1]) == 8\n",
    ),
    humaneval(
        1,
        'import math\n\n\ndef value(xs: list, x: float):\n    """ A polynomial\'s value. """\n'
        "    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\ndef root(xs: list):\n"
        '    """ Where it is zero, for lines. """\n',
        "    return -xs[0] / xs[1]\n",
        "root",
        "def check(candidate):\n    import random\n    rng = random.Random(4)\n    for _ in range(50):\n"
        "        coeffs = [rng.randint(-9, 9), rng.choice([-2, 3])]\n"
        "        assert math.fabs(value(coeffs, candidate(coeffs.copy()))) < 1e-4\n",
    ),
    humaneval(
        2,
        'def words(text):\n    """ Words with their first letters, as a list of tuples. """\n',
        "    return [(word[0], word) for word in text.split()]\n",
        "words",
        "def check(candidate):\n    assert candidate('ab c') == [('a', 'ab'), ('c', 'c')], 'first'\n"
        "    assert candidate('') == []\n",
    ),
    humaneval(
        3,
        'def twice(n):\n    """ Two times n; None for None. """\n',
        "    return None if n is None else helper(n)\n\n\ndef helper(n):\n    return 2 * n\n",
        "twice",
        "def check(candidate):\n    assert candidate(None) is None\n    assert candidate(2) == 4\n    assert True, 'always'\n",
    ),
]
PLUS_TEST = """
import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False

def assertion(out, exp, atol):
    same = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not same and atol != 0:
        np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert same, f"out: {out}, exp: {exp}"

def check(candidate):
    inputs = INPUTS
    results = RESULTS
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""
PLUS = [
    {
        **HUMANEVAL[0],
        "test": PLUS_TEST.replace("INPUTS", "[[[float(i), 0.0]] for i in range(400)]").replace(
            "RESULTS", "[float(i) + 1e-9 for i in range(400)]"
        ),
    },
    {
        **HUMANEVAL[2],
        "test": PLUS_TEST.replace("INPUTS", "[['a b'], ['']]").replace("RESULTS", "[[('a', 'a'), ('b', 'b')], []]"),
    },
]


def mbpp(number: int, text: str, code: str, tests: list[str], setup: str = "") -> dict[str, object]:
    return {
        "task_id": number,
        "text": text,
        "code": code.replace("\n", "\r\n"),
        "test_list": tests,
        "test_setup_code": setup,
        "challenge_test_list": [],
    }


MBPP = [
    mbpp(11, "Sum of two numbers, under the name of a built-in.", "def sum(a,b):\n  return a+b",
         ["assert sum(1,2) == 3", "assert sum(0,0) == 0", "assert sum(-1,1) == 0"]),
    mbpp(12, "Length of a chain of pairs.", "class Pair(object):\n  def __init__(self, a, b):\n    self.a = a\n    self.b = b\n"
         "def reach(pairs):\n  return max(p.b for p in pairs) - min(p.a for p in pairs)",
         ["assert reach([Pair(5, 24), Pair(15, 25)]) == 20", "assert reach([Pair(1, 2)]) == 1",
          "assert reach([Pair(0, 9)]) == 9"]),
    mbpp(13, "Depth of a tree that the set-up builds.", "class Node:\n  def __init__(self, data):\n    self.data = data\n"
         "    self.left = None\n    self.right = None\ndef depth(node):\n  if node is None:\n    return 0\n"
         "  return 1 + max(depth(node.left), depth(node.right))",
         ["assert (depth(root)) == 3", "assert (depth(root1)) == 1"],
         "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)\nroot1 = Node(1)"),
    mbpp(14, "Count the letters.", "from collections import Counter\ndef letters(text):\n  return Counter(text)",
         ["assert letters('aab') == {'a': 2, 'b': 1}", "assert letters('') == {}",
          "assert letters(('x', 'x'))==({'x': 2})"]),
    mbpp(15, "The value at a point, the point's class given.", "def norm(p):\n  return (p.x ** 2 + p.y ** 2) ** 0.5",
         ["assert norm(Point(3, 4)) == 5.0", "import math\nassert math.isclose(norm(Point(1, 1)), math.sqrt(2))"],
         "class Point:\n    def __init__(self, x, y):\n        self.x, self.y = x, y"),
]  # fmt: skip

MUTANTS = [
    ("humaneval", HUMANEVAL[0], "    return max(numbers) - min(numbers)\n", "wrong"),
    ("humaneval", HUMANEVAL[0], "    return numbers[5]\n", "error"),
    ("humaneval", HUMANEVAL[0], "    pass\n", "wrong"),
    ("humaneval", HUMANEVAL[1], "    return 0\n", "wrong"),
    # The checks' helper is the prompt's own, whatever the answer makes of it.
    ("humaneval", HUMANEVAL[1], "    return 0\n\nvalue = lambda xs, x: 0\n", "wrong"),
    ("humaneval", HUMANEVAL[3], "    while True: pass\n", "timeout"),
    ("humaneval", HUMANEVAL[3], "```python\ndef twice(n): return 2 * n if n else n\nimport os; os._exit(0)\n```", "exit"),
    ("humaneval", HUMANEVAL[3], "I cannot answer that.", "no_code"),
    ("humaneval", HUMANEVAL[3], "```python\ndef twice(n) return\n```", "syntax"),
    ("humaneval", HUMANEVAL[3], "```python\ndef other(n): return 2 * n\n```", "wrong"),
    ("humaneval", PLUS[0], "    return max(numbers) - min(numbers) + 1e-3\n", "wrong"),
    ("humaneval", PLUS[1], "    return [(word, word) for word in text.split()] + [('', '')]\n", "wrong"),
    ("mbpp", MBPP[0], "def sum(a, b): return a - b", "wrong"),
    ("mbpp", MBPP[0], "def add(a, b): return a + b", "error"),
    ("mbpp", MBPP[1], "class Pair:\n  def __init__(self, a, b): self.a, self.b = a, b\ndef reach(pairs): return 20", "wrong"),
    ("mbpp", MBPP[2],
     "class Node:\n  def __init__(self, data): self.left = self.right = None\ndef depth(node): return 3", "wrong"),
    ("mbpp", MBPP[3], "def letters(text): return {}", "wrong"),
    ("mbpp", MBPP[4], "def norm(p): return p.x + p.y", "wrong"),
]  # fmt: skip


def answers(kind: str, row: dict) -> list[str]:
    """The reference in each of the forms that a model may give it."""
    if kind == "mbpp":
        code = str(row["code"])
        return [code, f"Here you go:\n```python\n{code}\n```\nIt works.", f"[BEGIN]\n{code}\n[DONE]"]
    whole = row["prompt"] + row["canonical_solution"]
    return [row["canonical_solution"], f"Sure.\n\n```python\n{whole}```", f"The function:\n\n{whole}\n\nThat is all."]


@pytest.mark.parametrize(
    ("kind", "row"),
    [("humaneval", row) for row in HUMANEVAL] + [("humaneval", row) for row in PLUS] + [("mbpp", row) for row in MBPP],
    ids=[f"humaneval-{n}" for n in range(4)] + ["plus-0", "plus-1"] + [f"mbpp-{n}" for n in range(5)],
)  # fmt: skip
def test_references_pass(kind: str, row: dict) -> None:
    responses = answers(kind, row)
    if row.get("task_id") == "HumanEval/3":
        responses = responses[1:]  # its helper comes after a stop of the completion form
    grades = grade_codes(kind, [row] * len(responses), responses, 2, need(TOP))
    assert [grade.reason for grade in grades] == ["ok"] * len(responses), grades
    assert all(grade.correct and grade.extracted for grade in grades)


@pytest.mark.parametrize(("kind", "row", "response", "reason"), MUTANTS, ids=range(len(MUTANTS)))
def test_near_misses_do_not(kind: str, row: dict, response: str, reason: str) -> None:
    grade = grade_code(kind, row, response, need(TOP), Limits(seconds=1.5 if reason == "timeout" else 10))
    assert (grade.correct, grade.reason) == (False, reason)


def test_rows_are_checked() -> None:
    with pytest.raises(DataError, match="entry_point"):
        grade_code("humaneval", {**HUMANEVAL[0], "entry_point": None}, "x")
    with pytest.raises(DataError, match="test_list"):
        grade_code("mbpp", {**MBPP[0], "test_list": []}, "x")
    with pytest.raises(DataError, match="`code` is not Python"):
        grade_code("mbpp", {**MBPP[0], "code": "def"}, "x")
