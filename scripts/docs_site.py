"""What `mkdocs build` makes of this repository beyond the pages in docs/.

One page per command out of its option dataclass, so that the site cannot tell of a flag that is gone; one page per
notebook; copies of the files outside docs/ that pages link to. The functions without `on_` know nothing of MkDocs.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import posixpath
import re
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COPIES = "repository"
# pages that say more about a command
PAGES = {
    "quickstart": "evidence.md",
    "doctor": "doctor.md",
    "sft": "method.md",
    "mask": "method.md",
    "calibrate": "choosing-a-range.md",
    "sweep": "choosing-a-range.md",
    "recipes": "recipes.md",
    "generate": "five-minutes.md",
    "eval": "evaluation.md",
    "regrade": "tasks.md",
    "push": "artifact.md",
    "diagnose": "diagnostics.md",
    "report": "diagnostics.md",
    "explore": "diagnostics.md",
    "serve": "serving.md",
    "verify": "verify.md",
    "export": "serving.md",
    "env": "install.md",
}
LINK = re.compile(r"(\]\()(\.\./[^)\s#]+)(#[^)\s]*)?(\))")


def commands() -> dict[str, str]:
    """{command: one line}, as `loragate --help` lists them."""
    from loragate.cli.main import COMMANDS

    return {name: text for name, (_, text) in COMMANDS.items()}


def command_page(name: str) -> str:
    """The Markdown page of one command: summary, examples, then every setting with its default."""
    from loragate.cli.arguments import field_types, help_texts
    from loragate.cli.main import load_command as command_of

    command = command_of(name)
    texts, kinds = help_texts(command.options), field_types(command.options)
    lines = [f"# loragate {name}", "", command.summary, ""]
    if name in PAGES:
        lines += [f"More about it: [{_title(PAGES[name])}](../{PAGES[name]}).", ""]
    lines += ["```sh", *command.examples, "```", ""]
    for heading, fields in _groups(command.options, kinds).items():
        lines += [f"## {heading}", "", "| flag | value | default | |", "|---|---|---|---|"]
        lines += [_row(command, field, kinds[field.name], texts.get(field.name, "")) for field in fields]
        lines.append("")
    lines += [
        "## Every command",
        "",
        "| flag | |",
        "|---|---|",
        "| `--config FILE` | YAML file with any of these settings as keys (`max_rows` for `--max-rows`); flags override it |",
        "| `--print-config` | print the resolved settings and stop |",
        "| `--debug` | show the traceback of an error |",
        "",
    ]
    return "\n".join(lines)


def command_table(on_site: bool) -> str:
    """Every command with its one line: linked to its own page on the site, to a page of docs/ in the repository."""
    rows = [
        f"| [`{name}`](commands/{name}.md) | {_cell(text)} |"
        if on_site
        else f"| `{name}` | {_cell(text)} | [{_title(PAGES[name])}]({PAGES[name]}) |"
        for name, text in commands().items()
    ]
    head = ["| command | |", "|---|---|"] if on_site else ["| command | | more about it |", "|---|---|---|"]
    return "\n".join([*head, *rows])


def with_commands(page: str, on_site: bool) -> str:
    """The page with its table of commands as they are."""
    table = f"<!-- commands -->\n{command_table(on_site)}\n<!-- /commands -->"
    return re.sub(r"<!-- commands -->.*?<!-- /commands -->", lambda _: table, page, flags=re.S)


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its texts, its code as code blocks, and a link to the file itself."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"]).rstrip()
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    parts.insert(1, f"[The notebook itself]({path.name}); its outputs are not stored. Run it to see them.")
    return "\n\n".join(parts) + "\n"


def outside_links(text: str) -> set[str]:
    """Paths, from the repository's root, of files outside docs/ that a page of docs/ links to."""
    return {found.group(2).removeprefix("../") for found in LINK.finditer(text)}


def copied(path: str) -> str:
    """Where the site keeps the copy of a file of the repository."""
    return posixpath.join(COPIES, path + ".txt" if path.endswith((".md", ".html")) else path)


def inward(text: str) -> str:
    """The page with its links to files outside docs/ turned to their copies."""
    return LINK.sub(lambda found: f"{found[1]}{copied(found[2].removeprefix('../'))}{found[4]}", text)


def without_false_references(text: str) -> str:
    """`[0,1] [0,6]` are two ranges and no link to a heading called `0,6`."""
    parts = re.split(r"(^```.*?^```$|`[^`\n]*`)", text, flags=re.S | re.M)
    return "".join(part if part.startswith("`") else re.sub(r"\](\s)\[", r"]\1\\[", part) for part in parts)


def on_config(config: Any) -> Any:
    """Put the pages of commands and notebooks below their entries of the navigation."""
    notebooks = sorted(path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"))
    below = {
        "commands.md": [{name: f"commands/{name}.md"} for name in commands()],
        "python.md": [{_notebook_title(stem): f"notebooks/{stem}.md"} for stem in notebooks],
    }
    _nest(config.nav, below)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the made pages and the copies."""
    from mkdocs.structure.files import File

    for name in commands():
        files.append(File.generated(config, f"commands/{name}.md", content=command_page(name)))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_page(path)))
    wanted: set[str] = set()
    for path in (ROOT / "docs").glob("*.md"):
        wanted |= outside_links(path.read_text(encoding="utf-8"))
    for target in sorted(wanted):
        files.append(File.generated(config, copied(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the table of commands, and keep links inside the site."""
    if page.file.src_uri == "commands.md":
        markdown = with_commands(markdown, on_site=True)
    if "/" not in page.file.src_uri:
        markdown = inward(markdown)
    return without_false_references(markdown)


def _groups(options: type, offered: Collection[str]) -> dict[str, list[Any]]:
    """Settings that the command offers, under a heading for each class that they come from, the command's own first."""
    groups: dict[str, list[Any]] = {}
    left = {field.name: field for field in dataclasses.fields(options) if field.name in offered}
    for cls in options.__mro__[:-1]:
        about = (cls.__doc__ or "").splitlines()[0]
        heading = "Settings" if cls is options else re.split(r"[;(.]", about)[0].strip()
        own = inspect.get_annotations(cls)
        fields = [left.pop(name) for name in [name for name in left if name in own]]
        if fields:
            groups[heading] = fields
    return groups


def _row(command: Any, field: Any, kind: Any, text: str) -> str:
    flag = "--" + field.name.replace("_", "-")
    if field.name == command.positional:
        shown = f"`{field.name.upper()}`"
    else:
        shown = f"`{flag}`, `--no-{flag[2:]}`" if kind is bool else f"`{flag}`"
    return f"| {shown} | {_kind(kind)} | {_default(command, field, kind)} | {_cell(text)} |"


def _kind(hint: Any) -> str:
    """What a value is, in words."""
    if type(None) in typing.get_args(hint):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    plain = typing.get_origin(hint) or hint
    if plain is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    return {int: "integer", float: "number", dict: "JSON", bool: "", tuple: "text, may be repeated"}.get(plain, "text")


def _default(command: Any, field: Any, kind: Any) -> str:
    default = field.default
    unfilled = default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if unfilled or field.name in command.required_at_run:
        return "required"
    if default is dataclasses.MISSING:
        default = field.default_factory()
    if default in (None, "", (), {}):
        return ""
    if kind is bool:
        return "on" if default else "off"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"(?<=[a-z])_(?=[a-z])", "\\_", text)


def _nest(entries: list[Any], below: dict[str, list[dict[str, str]]]) -> None:
    """Give each page that is a key of `below` its pages as a section, at any depth of the navigation."""
    for entry in entries:
        for title, page in entry.items():
            if isinstance(page, list):
                _nest(page, below)
            elif page in below:
                entry[title] = [{"Overview": page}, *below[page]]


def _title(page: str) -> str:
    first = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").strip()


def _notebook_title(stem: str) -> str:
    cells = json.loads((ROOT / "docs" / "notebooks" / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    return "".join(cells[0]["source"]).splitlines()[0].lstrip("# ").strip()
