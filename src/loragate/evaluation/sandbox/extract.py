"""The program in an answer: fenced blocks first, bare code between prose next, a completion of the prompt last.

Answers are cut off, open a fence that they never close, close one that they never opened (a prompt may have opened it), and hold
fences in docstrings. So a fence counts only where Python's own strings and comments do not hold it, a block without its end is
read like prose with code in it, and what a block lacks is taken from the other blocks. Nothing is repaired: what is returned
stands in the answer, and compiles. No attempt compiles the text more than a bounded number of times, whatever the answer is.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint")
MAX_LENGTH = 65_536  # characters of an answer that are looked at
MAX_BLOCKS = 50  # fences, the last ones
MAX_ATTEMPTS = 300  # pieces that are compiled

_MARKER = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^\s`]*)[^\n`]*$", re.M)
# strings and comments of Python: what looks like a fence in them is none
_QUOTED = r'#[^\n]*|"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
# what stands for a fence in some prompts, such as MBPP's own; an end may share its line with code, and so may a beginning
_TAG = r"\[/?(?:BEGIN|DONE|PYTHON|CODE|ANSWER)\]|</?(?:code|python|answer|solution)>"
_TAG_FIRST = re.compile(rf"^[ \t]*(?:{_TAG})[ \t]*\n?", re.M | re.I)
_TAG_LAST = re.compile(rf"[ \t]*(?:{_TAG})[ \t]*$", re.M | re.I)
_LATE_FENCE = re.compile(r"^([^`\n]*[^`\s])[ \t]*```[ \t]*$", re.M)  # on the line of the last code
_SPECIAL_TOKEN = re.compile(r"(?:<[|｜][^\s<>|｜]*(?:[|｜]>?)?|</s>)\s*\Z")  # the last one, whole or cut off


@dataclass(frozen=True)
class Block:
    """A fenced block: its text as it stands, and whether its end is there."""

    text: str
    closed: bool

    @property
    def code(self) -> str:
        """The text without the margin that a list gives to it."""
        return _dedented(self.text)


def extract_code(
    response: str, entry_point: str | None = None, prompt: str | None = None, required: Collection[str] = ()
) -> str | None:
    """The program in a model's answer, or None; what is returned compiles.

    In this order: the last fenced block that defines `entry_point` (any block, where none is named), or the longest run of lines
    in it where its end is missing; such a run outside of fences, where no block tries to define it; with `prompt`, a
    continuation of the prompt's text, cut at the first of `STOPS`; the last block and the longest run that compile at all.
    Definitions that a block uses, or that are `required`, are added from the other blocks.

    Args:
        response: the model's text, prompt not included.
        entry_point: the function that is wanted.
        prompt: the code that the model was asked to continue, for data sets of that form.
        required: other names that the program must define.
    """
    text = _SPECIAL_TOKEN.sub("", response[:MAX_LENGTH].replace("\r\n", "\n"))
    text = _LATE_FENCE.sub(r"\1\n```", _TAG_LAST.sub("\n```", _TAG_FIRST.sub("```\n", text)))
    blocks, outside = _blocks(text)
    wanted: Callable[[str], bool] = (
        (lambda code: True) if entry_point is None else (lambda code: defines(code, entry_point))
    )
    found = next((code for block in reversed(blocks) if (code := _extract_from_block(block, wanted)) is not None), None)
    if found is None and entry_point is not None:
        tried = re.compile(rf"^[ \t]*(?:async\s+def|def|class)\s+{re.escape(entry_point)}\b", re.M)
        aside = any(block.closed and tried.search(block.text) for block in blocks)
        runs = ([run for run in _compilable_runs(part) if wanted(run)] for part in ([] if aside else reversed(outside)))
        found = next((_without_last_test(max(run, key=len), wanted) for run in runs if run), None)
    if found is not None:
        return _with_helpers(found, blocks, required, prompt)
    if prompt is not None:
        for part in [*(block.text for block in reversed(blocks)), *reversed(outside)]:
            whole = _sound_head(prompt + cut_at_stops(part))
            if whole.startswith(prompt) and (entry_point is None or _has_body(whole, entry_point)):
                return _with_helpers(whole, blocks, required, None)
    sound = [block.code for block in blocks if _parse(block.code) is not None]
    spans = [] if blocks else _compilable_runs(text)
    return sound[-1] if sound else max(spans, key=len) if spans else None


def cut_at_stops(completion: str) -> str:
    """Return a base model's completion up to where it begins something else."""
    ends = [completion.find(stop) for stop in STOPS]
    return completion[: min((end for end in ends if end >= 0), default=len(completion))]


def defines(source: str, name: str) -> bool:
    """Whether `source` binds `name` at its top level by def, class, assignment or import."""
    tree = _parse(source)
    return tree is not None and name in top_level_names(tree)


def top_level_names(tree: ast.Module) -> list[str]:
    """The names that a module binds at its top level, in order; "*" for an import of all names."""
    return [name for node in tree.body for name in _names_of(node)]


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return []


def _blocks(text: str) -> tuple[list[Block], list[str]]:
    """The last fenced blocks of a text, and all that stands outside of blocks, empty parts included."""
    blocks: list[Block] = []
    outside: list[str] = []
    at = doubtful = 0
    while opening := _MARKER.search(text, at):
        outside.append(text[at : opening.start()])
        plain, lexical = _ends(text, opening)
        closing = plain
        if lexical is not plain and doubtful < MAX_BLOCKS:
            doubtful += 1  # a string holds a fence, or a quote is one too many: then the strings say nothing
            longer, shorter = (_dedented(_between(text, opening, end)) for end in (lexical, plain))
            if len(_sound_head(longer)) > len(shorter):
                closing = lexical
        closed = closing is not None and not closing["info"]
        blocks.append(Block(_between(text, opening, closing), closed))
        # a marker that names a language opens the next block
        at = len(text) if closing is None else closing.end() if closed else closing.start()
    return blocks[-MAX_BLOCKS:], [*outside[-MAX_BLOCKS:], text[at:]]


def _ends(text: str, opening: re.Match[str]) -> tuple[re.Match[str] | None, re.Match[str] | None]:
    """The first marker that may end a block, and the first that does not stand in a string or comment of Python."""
    fence = opening["fence"]
    marker = rf"^[ \t]*{fence[0]}{{{len(fence)},}}[ \t]*(?P<info>[^\s`]*)[^\n`]*$"
    plain = re.compile(marker, re.M).search(text, opening.end())
    if plain is None or not re.search(r'"""|' + "'''", text[opening.end() : plain.start()]):
        return plain, plain  # only strings of several lines hold a line that begins with a fence
    for lexeme in re.compile(f"{marker}|{_QUOTED}", re.M | re.S).finditer(text, opening.end()):
        if lexeme["info"] is not None:
            return plain, plain if lexeme.start() == plain.start() else lexeme
    return plain, None


def _between(text: str, opening: re.Match[str], closing: re.Match[str] | None) -> str:
    return text[opening.end() + 1 : None if closing is None else closing.start()]


def _extract_from_block(block: Block, wanted: Callable[[str], bool]) -> str | None:
    """The code of a block if it is wanted; of one without its end, which may be cut off or go on in prose, the longest run."""
    if block.closed:
        return block.code if _parse(block.code) is not None and wanted(block.code) else None
    runs = [run for run in _compilable_runs(block.code) if wanted(run)]
    return _without_last_test(max(runs, key=len), wanted) if runs else None


def _without_last_test(source: str, wanted: Callable[[str], bool]) -> str:
    """Leave out a last statement that defines nothing: where the answer was cut off, half of a test may compile, and fail."""
    tree = _parse(source)
    last = tree.body[-1] if tree is not None and tree.body else None
    if not isinstance(last, ast.Assert | ast.Expr | ast.If | ast.For | ast.While | ast.With | ast.Try):
        return source
    rest = "".join(_lines(source)[: last.lineno - 1])
    return rest if wanted(rest) else source


def _sound_head(source: str) -> str:
    """The text up to the first statement at the margin with which it no longer compiles."""
    for _ in range(MAX_BLOCKS):
        found = _parse_or_error(source)
        if not isinstance(found, SyntaxError):
            return source if found else ""
        line, starts = 0, []
        for piece in _split_statements(source):
            if line < (found.lineno or 1):
                starts.append(line)
            line += piece.count("\n")
        source = "".join(_lines(source)[: starts[-1] if starts else 0])
    return ""


def _with_helpers(code: str, blocks: Sequence[Block], required: Collection[str], prompt: str | None) -> str:
    """Put before `code` what it uses and does not define: the last definition in the other blocks, with what that uses."""
    others = [tree for block in blocks if block.code != code and (tree := _parse(block.code)) is not None]
    given = _parse(f"{prompt}\n    pass\n") if prompt else None
    known = {*dir(builtins), *(top_level_names(given) if given else ())}
    known |= set(top_level_names(_parse(code) or ast.Module([], [])))
    nodes = [node for tree in others for node in tree.body if _names_of(node)]
    by_name = {name: place for place, node in enumerate(nodes) for name in _names_of(node)}
    missing, used = {*_globals_of(code), *required} - known, set[int]()
    while missing:
        name = missing.pop()
        known.add(name)
        place = by_name.get(name, by_name.get("*"))
        if place is not None and place not in used:
            used.add(place)
            missing |= _globals_of(ast.unparse(nodes[place])) - known
    return "\n".join([*(ast.unparse(nodes[place]) for place in sorted(used)), code])


def _globals_of(source: str) -> set[str]:
    """The global names that code reads."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tables = [symtable.symtable(source, "<answer>", "exec")]
        while tables:
            table = tables.pop()
            top = table.get_type() == "module"
            names |= {one.get_name() for one in table.get_symbols() if one.is_referenced() and (top or one.is_global())}
            tables += table.get_children()
    return names


def _parse(source: str) -> ast.Module | None:
    found = _parse_or_error(source)
    return found if isinstance(found, ast.Module) else None


def _parse_or_error(source: str) -> ast.Module | SyntaxError | None:
    """The tree of a text, or where it is not Python's; None for what cannot be parsed at all."""
    with warnings.catch_warnings(), suppress(ValueError, RecursionError, MemoryError):
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except SyntaxError as error:
            return error
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


def _compilable_runs(text: str) -> list[str]:
    """The runs of lines that compile, prose between them left out; each line is compiled a bounded number of times."""
    pieces = list(_split_statements(text))
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


def _split_statements(text: str) -> Iterator[str]:
    """Split at lines that begin at the margin, where a statement may begin."""
    piece: list[str] = []
    decorated = False
    for line in _lines(text):
        goes_on = line[:1] in (" ", "\t", ")", "]", "}", "\n", "#") or re.match(r"(else|elif|except|finally)\b", line)
        if piece and not (goes_on or decorated):
            yield "".join(piece)
            piece = []
        piece.append(line)
        decorated = line.startswith("@")
    if piece:
        yield "".join(piece)


def _lines(text: str) -> list[str]:
    """Lines with their ends, counted as Python counts those of a program."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _is_code(piece: str) -> bool:
    """Whether a piece compiles and does something: a lone word of prose is a valid expression too."""
    tree = _parse(piece)
    if tree is None:
        return False
    words = (ast.Call, ast.Constant, ast.Await)
    return all(not isinstance(node, ast.Expr) or isinstance(node.value, words) for node in tree.body)


def _is_open(piece: str) -> bool:
    """Whether a bracket or string of a piece goes on."""
    found = _parse_or_error(piece)
    return isinstance(found, SyntaxError) and ("never closed" in str(found) or "unterminated triple" in str(found))
