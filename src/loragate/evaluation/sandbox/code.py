"""Code tasks: an answer and a row of HumanEval, HumanEval+ or MBPP made into a program and what it is held against."""

from __future__ import annotations

import ast
import builtins
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loragate.errors import DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.sandbox.extract import extract_code, top_level_names
from loragate.evaluation.sandbox.programs import Checks, root_style_of, run_many, run_tests
from loragate.evaluation.sandbox.tiers import Limits

Row = Mapping[str, Any]


@dataclass(frozen=True)
class CodeTask:
    """A program of the model's and the checks of its data set, apart from each other."""

    program: str
    checks: Checks


def humaneval_program(row: Row, response: str) -> CodeTask | None:
    """Return the task for a row of HumanEval or HumanEval+ (prompt, test, entry_point), or None without code.

    A response may be a continuation of the prompt or an answer with the whole function; the latter is put behind the
    prompt, whose imports and helper functions it may rely on. Helpers that the checks use come from the prompt.
    """
    prompt, entry, test = _text(row, "prompt"), _text(row, "entry_point"), _text(row, "test")
    code = extract_code(response, entry, prompt)
    if code is None:
        return None
    program = code if code.startswith(prompt) else f"{prompt}\n    pass\n\n{code}\n"
    source = f"{test}\n\ncheck({entry})\n"
    names = dict.fromkeys([entry, *_free_names(f"{prompt}\n{source}", row)])
    return CodeTask(program, Checks(source, tuple(names), (entry,), before=prompt))


def mbpp_program(row: Row, response: str) -> CodeTask | None:
    """Return the task for a row of MBPP (code, test_list, test_setup_code, test_imports), or None without code.

    The functions under test are those that the reference `code` defines and the tests use. Definitions and imports of
    the set-up code are given to the program too; the rest of it runs on the side of the tests.
    """
    setup = str(row.get("test_setup_code") or "")
    tests = row.get("test_list")
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise DataError(f"MBPP row {row.get('task_id')!r}: `test_list` is {tests!r}; expected a list of asserts")
    imports = "\n".join(row.get("test_imports") or ())
    prepared = _module(setup, row, "test_setup_code").body
    classes = [node.name for node in prepared if isinstance(node, ast.ClassDef)]
    # An object of a class crosses only if the class is the program's.
    kept = "\n".join(ast.unparse(node) for node in prepared if not isinstance(node, ast.ClassDef))
    source = "\n".join([imports, kept, *tests]) + "\n"
    reference = top_level_names(_module(_text(row, "code"), row, "code"))
    used = _used_names(_module(source, row, "test_list"))
    required = [name for name in reference if name in used]
    code = extract_code(response, required[-1] if required else None)
    if code is None:
        return None
    shared = [
        ast.unparse(node)
        for node in prepared
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
    ]
    names = dict.fromkeys([*required, *classes, *_free_names(source, row)])
    program = "\n".join([*shared, code]) + "\n"
    return CodeTask(program, Checks(source, tuple(names), tuple(_called(source, required, row))))


KINDS: dict[str, Callable[[Row, str], CodeTask | None]] = {
    "humaneval": humaneval_program,
    "humaneval_plus": humaneval_program,
    "mbpp": mbpp_program,
}


def grade_code(
    kind: str,
    row: Row,
    response: str,
    tier: str = "bubblewrap",
    limits: Limits | None = None,
    *,
    cancel: threading.Event | None = None,
) -> Grade:
    """Grade one answer to a code task; the checks run in a process that the answer cannot reach.

    `reason` is "ok", "no_code", "syntax" (code, but none that compiles), or a reason of `ProgramResult`.

    Raises:
        DataError: for a row that lacks a field of its data set.
        SandboxError: when the tier does not work here.
    """
    task = KINDS[kind](row, response)
    if task is None:
        looks_like_code = "```" in response or "def " in response or "return" in response
        return Grade(False, None, "syntax" if looks_like_code else "no_code")
    result = run_tests(task.program, task.checks, tier, limits=limits, cancel=cancel)
    return Grade(result.passed, task.program, result.reason)


def grade_codes(
    kind: str,
    rows: Sequence[Row],
    responses: Sequence[str],
    workers: int = 1,
    tier: str = "bubblewrap",
    limits: Limits | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Grade]:
    """Grade `responses[i]` to `rows[i]` for all i, `workers` at a time, in order; raises as `grade_code`.

    `on_progress` is called with (answers done, answers in all). An interrupt kills what runs.
    """
    root_style_of(tier)
    cancel = threading.Event()

    def work(pair: tuple[Row, str]) -> Grade:
        return grade_code(kind, *pair, tier, limits, cancel=cancel)

    return run_many(work, list(zip(rows, responses, strict=True)), workers, on_progress, cancel)


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise DataError(f"row {row.get('task_id')!r}: `{field}` is {value!r}; expected text")
    return value


def _module(source: str, row: Row, field: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"row {row.get('task_id')!r}: `{field}` is not Python ({error})") from None


def _used_names(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _free_names(source: str, row: Row) -> list[str]:
    """Names that the checks use and neither they nor Python define: the program has to."""
    tree = _module(source, row, "test")
    bound = set(top_level_names(tree)) | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return sorted(_used_names(tree) - bound)


def _called(source: str, names: Sequence[str], row: Row) -> list[str]:
    """Those of `names` that the checks call."""
    calls = [node.func for node in ast.walk(_module(source, row, "test_list")) if isinstance(node, ast.Call)]
    called = {call.id for call in calls if isinstance(call, ast.Name)}
    return [name for name in names if name in called]
