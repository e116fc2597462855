"""Code tasks: the program in an answer, and what a row of HumanEval, HumanEval+ or MBPP holds it against.

A program is looked for in fenced blocks first, in bare code between prose next, in a completion of the prompt last. No attempt
compiles the text more than a bounded number of times, whatever the answer looks like.
"""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

from loragate.errors import DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.sandbox.run import Checks, Limits, require_sandbox, run_program

Row = Mapping[str, Any]
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint")
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)
MAX_LENGTH = 65_536  # characters of an answer that are looked at
MAX_BLOCKS = 50  # fences, the last ones
MAX_ATTEMPTS = 300  # pieces that are compiled


def humaneval_program(row: Row, response: str) -> tuple[str, Checks] | None:
    """The program and the checks for a row of HumanEval or HumanEval+ (prompt, test, entry_point), or None without code.

    A response may be a continuation of the prompt or an answer with the whole function; the latter is put behind the
    prompt, whose imports and helper functions it may rely on. Helpers that the checks use come from the prompt.
    """
    prompt, entry, test = _text(row, "prompt"), _text(row, "entry_point"), _text(row, "test")
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
    source = "\n".join([imports, kept, *tests]) + "\n"
    reference = top_level_names(_module(_text(row, "code"), row, "code"))
    tests_tree = _module(source, row, "test_list")
    used = {node.id for node in ast.walk(tests_tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    # the last one is what the task is about; helpers and classes come before it
    required = [name for name in reference if name in used]
    code = extract_code(response, required[-1] if required else None)
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


def extract_code(response: str, entry_point: str | None = None, prompt: str | None = None) -> str | None:
    """Return the Python of a model's answer, or None where there is none that compiles.

    In this order: the last fenced block that defines `entry_point` (any block, where none is named); the longest run of
    lines that compiles and defines it; with `prompt`, the answer as a continuation of the prompt's text, cut at the
    first of `STOPS`; the last fenced block and the longest run that compile at all.

    Args:
        response: the model's text, prompt not included.
        entry_point: the function that is wanted.
        prompt: the code that the model was asked to continue, for data sets of that form.
    """
    response = response[:MAX_LENGTH].replace("\r\n", "\n")
    bodies = [match[2] for match in FENCE.finditer(response)][-MAX_BLOCKS:]
    blocks = [_dedented(body) for body in bodies]
    sound = [block for block in blocks if _parse(block) is not None]
    for block in reversed(sound):
        if entry_point is None or defines(block, entry_point):
            return block
    spans = [] if blocks else _spans(response)  # where there are fences, code outside of them is an aside
    wanted = [span for span in spans if entry_point is not None and defines(span, entry_point)]
    if wanted:
        return max(wanted, key=len)
    if prompt is not None:
        for body in [*reversed(bodies), response]:
            whole = prompt + cut_at_stops(body)
            if _parse(whole) is not None and (entry_point is None or _has_body(whole, entry_point)):
                return whole
    if sound:
        return sound[-1]
    return max(spans, key=len) if spans else None


def cut_at_stops(completion: str) -> str:
    """Return a base model's completion up to where it begins something else."""
    ends = [completion.find(stop) for stop in STOPS]
    return completion[: min((end for end in ends if end >= 0), default=len(completion))]


def defines(source: str, name: str) -> bool:
    """Whether `source` binds `name` at its top level by def, class, assignment or import."""
    tree = _parse(source)
    return tree is not None and name in top_level_names(tree)


def top_level_names(tree: ast.Module) -> list[str]:
    """The names that a module binds at its top level, in order."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return names


def _parse(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _has_body(source: str, name: str) -> bool:
    """Whether function `name` is more than its docstring: an empty continuation of a prompt is no answer."""
    tree = _parse(source)
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = node.body[0]
            document = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            return len(node.body) > 1 or not document
    return False


def _dedented(block: str) -> str:
    """Take the indentation of the first line of code from all lines, for blocks inside lists."""
    first = next((line for line in block.split("\n") if line.strip()), "")
    margin = first[: len(first) - len(first.lstrip())]
    if not margin or not re.match(r"(def\b|class\b|import\b|from\b|async\b|@)", first.lstrip()):
        return block
    return "\n".join(line.removeprefix(margin) for line in block.split("\n"))


def _spans(text: str) -> list[str]:
    """The runs of lines that compile, prose between them left out; each line is compiled a bounded number of times."""
    pieces = _pieces(text)
    spans: list[str] = []
    run: list[str] = []
    position = attempts = 0
    while position < len(pieces) and attempts < MAX_ATTEMPTS:
        piece, following = pieces[position], position + 1
        attempts += 1
        # An open bracket or string may go on over lines that begin at the margin.
        while not _is_code(piece) and _is_open(piece) and following < len(pieces) and attempts < MAX_ATTEMPTS:
            piece, following, attempts = piece + pieces[following], following + 1, attempts + 1
        if _is_code(piece):
            run.append(piece)
            position = following
            continue
        spans, run = [*spans, "".join(run)], []
        position += 1
    spans.append("".join(run))
    return [span for span in spans if span.strip()]


def _pieces(text: str) -> list[str]:
    """Split at lines that begin at the margin, where a statement may begin."""
    pieces: list[list[str]] = []
    decorated = False
    for line in text.splitlines(keepends=True):
        goes_on = line[:1] in (" ", "\t", ")", "]", "}", "\n") or re.match(r"(else|elif|except|finally)\b", line)
        if pieces and (goes_on or decorated):
            pieces[-1].append(line)
        else:
            pieces.append([line])
        decorated = line.startswith("@")
    return ["".join(piece) for piece in pieces]


def _is_code(piece: str) -> bool:
    """Whether a piece compiles and does something: a lone word of prose is a valid expression too."""
    tree = _parse(piece)
    if tree is None:
        return False
    words = (ast.Call, ast.Constant, ast.Await)
    return all(not isinstance(node, ast.Expr) or isinstance(node.value, words) for node in tree.body)


def _is_open(piece: str) -> bool:
    """Whether a bracket or string of a piece goes on."""
    with suppress(ValueError, RecursionError, MemoryError):
        try:
            ast.parse(piece)
        except SyntaxError as error:
            return "never closed" in str(error) or "unterminated triple" in str(error)
    return False


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
