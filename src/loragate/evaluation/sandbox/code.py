"""Code tasks: what a row of HumanEval, MBPP or EvalPlus's sets holds the program in an answer against."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from loragate.errors import DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.sandbox.extract import extract_code, top_level_names
from loragate.evaluation.sandbox.run import Checks, Limits, require_sandbox, run_program

Row = Mapping[str, Any]
EVALPLUS_RELEASE_ERROR = (
    "it has the inputs of EvalPlus's own files in place of tests; give the rows of evalplus/humanevalplus or evalplus/mbppplus on "
    "the hub, which hold the tests in `test`"
)


def is_evalplus_release(row: Row) -> bool:
    """Whether a row has EvalPlus's inputs; without them only the base tests would run."""
    return any(row.get(name) is not None for name in ("base_input", "plus_input"))


def humaneval_program(row: Row, response: str) -> tuple[str, Checks] | None:
    """The program and the checks for a row of HumanEval or HumanEval+ (prompt, test, entry_point), or None without code.

    A response may be a continuation of the prompt or an answer with the whole function; the latter is put behind the
    prompt, whose imports and helper functions it may rely on. Helpers that the checks use come from the prompt.
    """
    prompt, entry = _text(row, "prompt"), _text(row, "entry_point")
    test = _text(row, "test")
    code = extract_code(response, entry, prompt)
    if code is None:
        return None
    # the prompt ends in the head of its function: `pass` closes it, and the answer's own definition takes its place
    program = code if code.startswith(prompt) else f"{prompt}\n    pass\n\n{code}\n"
    source = f"{test}\n\ncheck({entry})\n"
    _module(f"{prompt}\n{source}", row, "test")
    return program, Checks(source, (entry,), before=prompt)


def mbpp_program(row: Row, response: str) -> tuple[str, Checks] | None:
    """The program and the checks for a row of MBPP (code, test_list, test_setup_code, test_imports), or None without code.

    A row of MBPP+ has a `test`, which holds all of `test_list` and more, and runs in its place.

    The functions under test are those that the reference `code` defines and the tests use. Definitions and imports of
    the set-up code are given to the program too; the rest of it runs on the side of the tests.
    """
    setup = str(row.get("test_setup_code") or "")
    tests = row.get("test_list")
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise DataError(f"MBPP row {row.get('task_id')!r}: `test_list` is {tests!r}; expected a list of asserts")
    imports = "\n".join(row.get("test_imports") or ())
    prepared = _module(setup, row, "test_setup_code").body
    # An object of a class crosses only if the class is the program's.
    kept = "\n".join(ast.unparse(node) for node in prepared if not isinstance(node, ast.ClassDef))
    source = "\n".join([imports, kept, *([_text(row, "test")] if row.get("test") else tests)]) + "\n"
    reference = top_level_names(_module(_text(row, "code"), row, "code"))
    tests_tree = _module(source, row, "test_list")
    used = {node.id for node in ast.walk(tests_tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    # the last one is what the task is about; helpers and classes come before it
    required = [name for name in reference if name in used]
    code = extract_code(response, required[-1] if required else None, required=required)
    if code is None:
        return None
    shared = [
        ast.unparse(node)
        for node in prepared
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
    ]
    program = "\n".join([*shared, code]) + "\n"
    calls = [node.func for node in ast.walk(tests_tree) if isinstance(node, ast.Call)]
    # what is only passed on or compared with may be missing until a test uses it
    called = {call.id for call in calls if isinstance(call, ast.Name)}
    return program, Checks(source, tuple(name for name in required if name in called))


KINDS: dict[str, Callable[[Row, str], tuple[str, Checks] | None]] = {
    "humaneval": humaneval_program,
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
    if is_evalplus_release(row):
        raise DataError(f"row {row.get('task_id')!r}: {EVALPLUS_RELEASE_ERROR}")
    task = KINDS[kind](row, response)
    if task is None:
        looks_like_code = "```" in response or "def " in response or "return" in response
        return Grade(False, None, "syntax" if looks_like_code else "no_code")
    program, checks = task
    result = run_program(program, checks, tier, limits=limits, cancel=cancel)
    return Grade(result.passed, program, result.reason)


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
    require_sandbox(tier)
    cancel = threading.Event()
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        jobs = [
            pool.submit(grade_code, kind, row, response, tier, limits, cancel=cancel)
            for row, response in zip(rows, responses, strict=True)
        ]
        try:
            for done, job in enumerate(as_completed(jobs), start=1):
                job.result()
                if on_progress is not None:
                    on_progress(done, len(jobs))
        except BaseException:
            cancel.set()
            for job in jobs:
                job.cancel()
            raise
    return [job.result() for job in jobs]


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
