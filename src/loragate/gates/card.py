"""The model card of an artifact: what it is, how its range was chosen, what was measured, and what was not.

Made from the record in gate_config.json alone, whose evidence is free-form: what is absent or of another kind is left out or
said to be unknown. Names come from users, so every text is escaped for the place where it stands.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from loragate.gates.quantised import NONE
from loragate.hub_names import is_hub_id
from loragate.version import __version__

_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]+|\s+")
_FRONT = re.compile(r"\A---\r?\n(.*?)^---\r?$", re.S | re.M)
_WHERE = {"token": "each token and module", "module": "each module", "global": "all modules together"}
_OBJECTIVES = {
    "random": "none: random gates (a control)",
    "ce": "cross-entropy (the paper's ablation)",
    "anchored": "anchored entropy on its own answers (an extension of loragate, not SCALE)",
    "reward": "verifiable reward (an extension of loragate, not SCALE)",
}


def render_card(name: str, record: dict[str, Any]) -> str:
    """README.md of an artifact.

    Args:
        name: title, mostly the folder's name.
        record: gate_config.json as a dictionary, checked by the strict reader or about to be written.
    """
    base = str(record["base"]["id"])
    selection, training = _mapping(record.get("selection")), _mapping(record.get("training"))
    scores = _scores(selection)
    return _template().render(
        name=name,
        base=base or "a base without a name",
        base_id=base if is_hub_id(base) else "",
        acting=_acting(_mapping(record["gate"]), selection, training),
        facts=_facts(record, selection, training),
        scores=scores,
        scores_on=_scores_on(selection),
        retained=any(len(row) > 5 for row in scores),
        notes=_notes(selection, training),
        measured=_measured(scores, selection),
        version=__version__,
    )


def with_base(card: str, base: str) -> str:
    """A card whose front matter names `base` as its base model, in place of what it named; the rest is untouched."""
    found = _FRONT.match(card)
    line = f"base_model: {_yaml(base)}"
    if found is None:
        return f"---\nlibrary_name: loragate\n{line}\n---\n\n{card}"
    matter = found[1]
    if re.search(r"^base_model:.*$", matter, re.M):
        # a list of names stands in indented or dashed lines below its key
        matter = re.sub(
            r"^base_model:.*\n(?:[ \t]*-[ \t].*\n|[ \t]+.*\n)*", lambda _: f"{line}\n", matter, count=1, flags=re.M
        )
    else:
        matter = f"{line}\n{matter}"
    return card[: found.start(1)] + matter + card[found.end(1) :]


def plain(text: Any) -> str:
    """A text as Markdown that shows exactly it: one line, nothing in it read as markup or HTML."""
    line = _UNSEEN.sub(" ", str(text)).strip()
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # brackets are links, and underscores emphasis, only in these places
    return re.sub(r"([\\`*|~$]|\](?=[(\[:])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", line)


def code(text: Any) -> str:
    """A text as a Markdown code span, in a table as well."""
    line = _UNSEEN.sub(" ", str(text)).strip() or " "
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", line)), default=0))
    space = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{space}{line}{space}{fence}".replace("|", r"\|")


def _yaml(text: str) -> str:
    """A text as a double-quoted YAML scalar on one line."""
    import yaml

    return yaml.safe_dump(text, default_style='"', width=math.inf, allow_unicode=False).strip()


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Markdown, not HTML: the filters above escape, and every value of a user goes through one of them
    environment = Environment(
        loader=PackageLoader("loragate.gates", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(plain=plain, code=code, yaml=_yaml)
    return environment.get_template("card.md.jinja")


def _acting(gate: dict[str, Any], selection: dict[str, Any], training: dict[str, Any]) -> str:
    if selection.get("accepted") is False:
        return "with gates that are off: λ = 1 everywhere, so this folder answers exactly as the plain adapter does."
    objective = str(_mapping(training.get("settings")).get("objective", "entropy"))
    kind = {"entropy": "entropy gates", "random": "random gates (a control)"}.get(
        objective, f"gates ({plain(objective)})"
    )
    return (
        f"with {kind}: for {_WHERE.get(gate['granularity'], 'each module')} the adapter's delta is scaled by λ in "
        f"[{gate['lower']:g}, {gate['upper']:g}]."
    )


def _facts(record: dict[str, Any], selection: dict[str, Any], training: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the first table; a value is Markdown already."""
    gate, base, adapter = record["gate"], record["base"], record["adapter"]
    settings, data = _mapping(training.get("settings")), _mapping(training.get("data"))
    revision, storage = base.get("revision"), base.get("quantization")
    facts = [
        ("base", code(base["id"] or "unnamed") + (f" at {code(revision)}" if revision else "")),
        ("adapter", _adapter(adapter)),
        (
            "range of λ",
            f"[{gate['lower']:g}, {gate['upper']:g}], τ {gate['tau']:g}, one gate for {_WHERE.get(gate['granularity'])}",
        ),
        ("gated modules", f"{len(record['modules']):,}" + _counted(training.get("parameters"), ", {:,} parameters")),
        ("how the range was chosen", _chosen(selection)),
    ]
    if storage and storage != NONE:
        facts.append(("storage of the base in training", plain(storage)))
    if not training:
        return [*facts, ("training", "not recorded")]
    rows = _counted(training.get("rows"), ", {:,} rows") + _counted(
        training.get("response_tokens"), ", {:,} response tokens"
    )
    facts.append(("data", (plain(data["source"]) if data.get("source") else "not recorded") + rows))
    # the artifact records the support that was used; 0 in the settings says that it was the whole vocabulary
    k = settings["k"] if _number(settings.get("k")) else record["k"]
    facts.append(("objective", _objective(settings, k)))
    facts.append(("steps", _steps(training, settings)))
    before, after = training.get("entropy_before"), training.get("entropy_after")
    if _number(before) and _number(after):
        facts.append((f"{_entropy(k)}, normalised", f"{before:.3f} before, {after:.3f} after"))
    shares = [_mapping(training.get("gates")).get(key) for key in ("below_zero", "zero_to_one", "above_one")]
    if all(_number(share) for share in shares):
        facts.append(("share of λ < 0 / 0 to 1 / > 1", " / ".join(f"{share:.3f}" for share in shares)))
    return facts


def _adapter(adapter: dict[str, Any]) -> str:
    commit = f" at {code(str(adapter['revision']))}" if adapter.get("revision") else ""
    named = f"{code(adapter['id'])}{commit}, " if adapter.get("id") else ""
    rank, alpha = adapter.get("rank"), adapter.get("alpha")
    size = f"rank {rank:g}, α {alpha:g}, " if _number(rank) and _number(alpha) else ""
    return f"{named}in `adapter/`, {size}sha256 {code(str(adapter['sha256'])[:12])}…"


def _chosen(selection: dict[str, Any]) -> str:
    if not selection:
        return "not recorded"
    if not _scores(selection):
        why = f" ({plain(selection['why'])})" if selection.get("why") else ""
        return plain(selection.get("reason") or "given by the user; not compared with the plain adapter") + why
    picked = plain(selection.get("picked", "nothing"))
    found = f"picked {picked}" if selection.get("accepted") else "nothing beat the adapter, which remains (λ = 1)"
    return f"{found}; {plain(selection.get('method', 'by its score on a probe'))}"


def _objective(settings: dict[str, Any], k: int | None) -> str:
    name = str(settings.get("objective", "entropy"))
    return f"{_entropy(k)} (SCALE)" if name == "entropy" else _OBJECTIVES.get(name, plain(name))


def _steps(training: dict[str, Any], settings: dict[str, Any]) -> str:
    if settings.get("objective") == "random":
        return f"none: drawn with seed {plain(settings.get('seed'))} and standard deviation {plain(settings.get('random_scale'))}"
    text = plain(training.get("steps", "unknown"))
    if _number(settings.get("batch_size")) and _number(settings.get("learning_rate")):
        text += f" of batch {settings['batch_size']}, learning rate {settings['learning_rate']:g}"
    return text


def _entropy(k: int | None) -> str:
    if k is None:
        return "top-k entropy"
    return f"top-{k} entropy" if k else "full entropy"


def _scores(selection: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of scores; columns for retained skills only where they were measured."""
    retained = _mapping(_mapping(selection.get("retention")).get("evidence"))
    signs = _mapping(selection.get("signs"))
    found = {name: row for name, row in _mapping(selection.get("evidence")).items() if _is_score(row)}
    found.pop("difference", None)  # a sweep keeps the difference of two rows beside them
    compared = {name: row for name, row in _mapping(selection.get("references")).items() if _is_score(row)}
    rows = []
    for name, row in {**found, **compared}.items():
        sign = _mapping(signs.get(name))
        ended = f"{100 * sign['finished']:.0f}" if _number(sign.get("finished")) else ""
        tokens = f"{sign['tokens']:.0f}" if _number(sign.get("tokens")) else ""
        line = [plain(name) + (" (for comparison)" if name in compared else ""), *_interval(row), ended, tokens]
        if retained:
            line += _interval(retained[name]) if _is_score(retained.get(name)) else ["", ""]
        rows.append(line)
    return rows


def _measured(scores: list[list[str]], selection: dict[str, Any]) -> str:
    """The card's sentence on what its scores do not show."""
    if not scores:
        return "No score was measured when this folder was written."
    if selection.get("accepted") is True:
        return "The score of what was picked is flattered by the choice; measure it on other questions."
    return "The scores above are those of the choice; measure on other questions."


def _scores_on(selection: dict[str, Any]) -> str:
    probe = _mapping(selection.get("probe"))
    if not probe:
        return (
            f"Average over {selection['n']:,} answers on the probe." if _number(selection.get("n")) else "On the probe."
        )
    labelled = probe.get("kind") == "labelled"
    against = "labels" if labelled else "the adapter's own majority answers, without labels"
    count = f"{plain(probe.get('questions', 'the'))} probe questions × {plain(probe.get('samples', 1))} samples"
    return f"Average over {count}, scored against {against}."


def _notes(selection: dict[str, Any], training: dict[str, Any]) -> list[str]:
    vetoed, warnings = _mapping(selection.get("vetoed")), _mapping(selection.get("warnings"))
    notes = [
        f"{plain(name)} could not be trained: {plain(reason)}."
        for name, reason in _mapping(selection.get("failed")).items()
    ]
    notes += [f"{plain(name)} was not eligible: it {plain(reason)}." for name, reason in vetoed.items()]
    for name in dict.fromkeys(("adapter", selection.get("picked"))):
        found = warnings.get(name) if isinstance(name, str) else None
        notes += [f"Warning on {plain(name)}: {plain(phrase)}." for phrase in found or ()]
    for name in _mapping(selection.get("references")):
        notes += [f"For comparison: {plain(phrase)}." for phrase in warnings.get(name) or ()]
    if training.get("stopped"):
        notes.append(f"Training was stopped: {plain(training['stopped'])}.")
    if selection.get("note"):
        notes.append(f"{plain(selection['note'])}.")
    return notes


def _interval(row: dict[str, Any]) -> list[str]:
    return [f"{100 * row['mean']:.1f}", f"{100 * row['low']:.1f}–{100 * row['high']:.1f}"]


def _is_score(value: Any) -> bool:
    return isinstance(value, dict) and all(_number(value.get(key)) for key in ("mean", "low", "high"))


def _counted(value: Any, form: str) -> str:
    return form.format(value) if _number(value) else ""


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
