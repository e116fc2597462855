"""The model card of an artifact: what it is, how its range was chosen, what was measured, and what was not.

Made from the record in gate_config.json alone; the text is `card.md.jinja`. The record's evidence is free-form, so what is
absent or of another kind is left out or said to be unknown. Names come from users, so every text is escaped for its place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from loragate.display import format_temperature
from loragate.gates.recommended import dict_or_empty, is_number, recommended_temperature
from loragate.hub_names import is_hub_id
from loragate.version import __version__

LIBRARY = "library_name: loragate"
"""The line in a card's front matter by which it is known."""
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
# controls, line separators and the byte-order mark, which is no white space to `\s`
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]+|\s+")


def render_card(name: str, record: dict[str, Any]) -> str:
    """README.md of an artifact with a title, from its gate_config.json: checked by the strict reader, or about to be written."""
    base = str(record["base"]["id"])
    front = ModelCardData(
        library_name=LIBRARY.split()[-1],
        base_model=base if is_hub_id(base) else None,
        base_model_relation="adapter" if is_hub_id(base) else None,
        pipeline_tag="text-generation",
        tags=["lora", "peft", "loragate", "scale"],
    )
    selection, training = dict_or_empty(record.get("selection")), dict_or_empty(record.get("training"))
    settings = dict_or_empty(training.get("settings"))
    scores = _scores(selection)
    temperature = recommended_temperature(record)
    card = ModelCard.from_template(
        front,
        template_path=str(_TEMPLATE),
        name=name,
        base=record["base"],
        adapter=record["adapter"],
        gate=record["gate"],
        modules=len(record["modules"]),
        sampling=None if temperature is None else format_temperature(temperature),
        selection=selection,
        chosen=dict_or_empty(selection.get("recommendation")),
        dev=dict_or_empty(selection.get("dev")),
        training=training,
        settings=settings,
        data=dict_or_empty(training.get("data")),
        shares=dict_or_empty(training.get("gates")),
        # the artifact records the support that was used; 0 in the settings says that it was the whole vocabulary
        k=settings["k"] if is_number(settings.get("k")) else record["k"],
        scores=scores,
        retained=any(len(row) > 5 for row in scores),
        notes=_notes(selection),
        version=__version__,
        plain=escape_markdown,
        code=format_code_span,
        count="{:,}".format,
    )
    return str(card)


def escape_markdown(text: Any) -> str:
    """A text as Markdown that shows exactly it: one line, nothing in it read as markup or HTML."""
    line = _UNSEEN.sub(" ", str(text)).strip()
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # brackets are links, and underscores emphasis, only in these places
    return re.sub(r"([\\`*|~$]|\](?=[(\[:])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", line)


def format_code_span(text: Any) -> str:
    """A text as a Markdown code span, in a table as well."""
    line = _UNSEEN.sub(" ", str(text)).strip() or " "
    # a fence longer than every run of backticks inside; a space keeps a backtick at an end apart from it
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", line)), default=0))
    space = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{space}{line}{space}{fence}".replace("|", r"\|")


def _scores(selection: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of scores on the dev set; columns for the retention set only where it was evaluated."""
    variants = selection.get("variants")
    found = [row for row in (variants if isinstance(variants, list) else []) if _is_score(row)]
    retained = any(_is_score(row.get("retention")) for row in found)
    rows = []
    for row in found:
        ended = f"{100 * (1 - row['no_eos']):.0f}" if is_number(row.get("no_eos")) else ""
        tokens = f"{row['tokens']:.0f}" if is_number(row.get("tokens")) else ""
        line = [escape_markdown(row.get("label", "?")), *_interval(row), ended, tokens]
        if retained:
            line += _interval(row["retention"]) if _is_score(row.get("retention")) else ["", ""]
        rows.append(line)
    return rows


def _notes(selection: dict[str, Any]) -> list[str]:
    sentences = {
        "{} was not taken: it {}.": dict_or_empty(selection.get("retention")).get("vetoed"),
        "{} is left out: {}.": selection.get("left_out"),
        "The training of {} diverged: {}.": selection.get("diverged"),
    }
    return [
        sentence.format(escape_markdown(name), escape_markdown(why))
        for sentence, found in sentences.items()
        for name, why in dict_or_empty(found).items()
    ]


def _interval(row: dict[str, Any]) -> list[str]:
    return [f"{100 * row['mean']:.1f}", f"{100 * row['low']:.1f}–{100 * row['high']:.1f}"]


def _is_score(value: Any) -> bool:
    """Whether a value of a free-form record is a score with its interval."""
    return isinstance(value, dict) and all(is_number(value.get(key)) for key in ("mean", "low", "high"))
