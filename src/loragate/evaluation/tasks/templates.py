r"""Prompts and golds from rows, in a sandboxed template language (Jinja without attribute tricks, files or globals).

A name that a row cannot fill is an error and never an empty text: a prompt with a hole looks like a model that cannot
answer. Two filters are added to Jinja's own: `boxed`, the content of the last \boxed{...}, and `undollar`, which takes
the dollar signs of LaTeX mathematics away.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loragate.errors import ConfigError, DataError
from loragate.evaluation.answers import last_boxed


def _boxed(text: str) -> str:
    found = last_boxed(text)
    if not found:
        raise ValueError(r"there is no \boxed{...} in it")
    return found


def _undollar(text: str) -> str:
    return re.sub(r"(?<!\\)\$", "", text).strip()


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.globals.clear()
    environment.filters |= {"boxed": _boxed, "undollar": _undollar}
    return environment


@cache
def _compile(source: str) -> Template:
    return _environment().from_string(source)


def is_template(text: str) -> bool:
    """Whether a text is a template rather than the name of a column."""
    return "{{" in text or "{%" in text


def variables(source: str, place: str) -> set[str]:
    """Names that a template reads.

    Raises:
        ConfigError: for a template that cannot be read; `place` names file and key.
    """
    try:
        _compile(source)
        return meta.find_undeclared_variables(_environment().parse(source))
    except TemplateSyntaxError as error:
        raise ConfigError(f"{place}: line {error.lineno} of the template: {error.message}") from None


def render(source: str, values: Mapping[str, Any], what: str) -> str:
    """The text of a template.

    Raises:
        DataError: naming `what` (place and template) if it cannot be filled.
    """
    try:
        return _compile(source).render(values)
    except Exception as error:  # filters raise whatever the row's values make them raise
        raise DataError(f"{what} cannot be filled: {error}") from None


def prompts_hash(prompts: Sequence[str]) -> str:
    """SHA-256 (hex) over rendered prompts in their order, chat template included.

    Two runs asked the same questions in the same words exactly when this is equal.
    """
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
