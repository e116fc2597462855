"""Finding the program in a model's answer: fenced blocks first, bare code between prose next, a completion last.

No attempt here compiles the text more than a bounded number of times, whatever the answer looks like.
"""

from __future__ import annotations

import ast
import re
import warnings

STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint")
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)
MAX_LENGTH = 65_536
MAX_BLOCKS = 50
MAX_ATTEMPTS = 300


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
    spans = [] if blocks else _spans(response)
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
    try:
        ast.parse(piece)
    except SyntaxError as error:
        return "never closed" in str(error) or "unterminated triple" in str(error)
    except (ValueError, RecursionError, MemoryError):
        return False
    return False
