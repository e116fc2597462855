"""What the documents promise: command lines parse, snippets run, links and anchors lead somewhere, the site builds.

A Python snippet that cannot run has `<!-- not run: reason -->` on the line before its fence. Snippets marked
`<!-- walk -->` are one walk through the commands, which a slow test takes as it stands.
"""

import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import unicodedata
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import loragate
from loragate import errors
from loragate.cli import main as program
from loragate.cli.arguments import build_app, field_types, help_texts, parse, read_config
from loragate.cli.main import COMMANDS, overview
from loragate.errors import ConfigError
from loragate.evaluation.sandbox import probe as probe_sandbox
from tiny import load_script, tiny_rows, write_adapter, write_base

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LANGUAGES = ("", "sh", "bash", "python", "json", "yaml", "toml", "text", "dockerfile")
# first words of shell lines that belong to others
OTHERS = {"vllm", "lm_eval", "sbatch", "sky", "srun", "curl", "accelerate", "torchrun", "mkdocs", "jupyter", "apt"}
OTHERS |= {"pytest", "pre-commit", "docker", "huggingface-cli", "hf", "eval", "source", "export"}
# flags of other programs that pages name by themselves
FOREIGN_FLAGS = {"--lora-paths", "--lora-modules", "--max-loras", "--kill-on-bad-exit", "--strict"}


class Fence(NamedTuple):
    """A code block: its page, first line, language, text, and the HTML comment just before it."""

    page: Path
    line: int
    language: str
    text: str
    comment: str


@functools.cache
def fences(path):
    found, start, before = [], None, ""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            if start is None:
                start, language = number, line[3:].strip()
                before = lines[number - 2].strip() if number > 1 else ""
            else:
                text = "\n".join(lines[start : number - 1]) + "\n"
                comment = before[4:-3].strip() if before.startswith("<!--") else ""
                found.append(Fence(path, start, language, text, comment))
                start = None
    assert start is None, f"{path.name}:{start}: a code block is not closed"
    return found


def blocks(*languages):
    return [fence for path in DOCUMENTS for fence in fences(path) if fence.language in languages]


def prose(path):
    """The page without code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def command(name):
    assert name in COMMANDS, f"there is no command {name}"
    return program.load_command(name)


@functools.cache
def flags_of(name):
    arguments = build_app(command(name))[name].assemble_argument_collection()
    return {"--help", "-h", "--help-all"} | {
        flag for found in arguments for flag in found.names if flag.startswith("-")
    }


def words_of(line):
    """The words of a shell line, up to a comment, a redirection, a pipe or a second command."""
    words = shlex.split(line, comments=True)
    return words[: next((at for at, word in enumerate(words) if word in (">", ">>", "|", "&&", ";")), len(words))]


def refusal(name, arguments):
    """What a command says against its arguments, or None."""
    try:
        parse(command(name), arguments)
    except ConfigError as error:
        return str(error)
    return None


def shell_lines():
    """(place, line) of every shell line, continued ones joined."""
    for fence in blocks("sh", "bash"):
        text = re.sub(r"\\\n\s*", " ", fence.text)
        for line in text.splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield f"{fence.page.name}:{fence.line}", line.strip()
    for fence in blocks(""):
        for line in fence.text.splitlines():
            if line.startswith("loragate "):
                yield f"{fence.page.name}:{fence.line}", line


def inline_lines():
    """(place, line) of every `loragate …` in running text."""
    for path in DOCUMENTS:
        for line in re.findall(r"`(loragate [a-z][^`\n]*)`", prose(path)):
            yield path.name, line.replace("\\|", "|")


@pytest.fixture
def in_a_folder_with_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = [fence.text for fence in fences(DOCS / "training.md") if fence.language == "yaml"]
    Path("calibrate.yaml").write_text(example, encoding="utf-8")
    for name in ("sft.yaml", "wide.yaml", "grid.yaml"):
        Path(name).write_text("max_rows: 100\n")
    return tmp_path


def test_fences_are_of_a_known_language():
    for fence in (fence for path in DOCUMENTS for fence in fences(path)):
        assert fence.language in LANGUAGES, f"{fence.page.name}:{fence.line}: unknown language {fence.language}"


def test_shell_lines_parse(in_a_folder_with_configs):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    seen = 0
    for place, line in shell_lines():
        words = [word for word in words_of(line) if not re.match(r"[A-Z_]+=", word)]
        first, rest = words[0], words[1:]
        if first == "loragate":
            seen += 1
            why = refusal(rest[0], rest[1:])
            assert why is None, f"{place}: {line}: {why}"
        elif first == "make":
            assert rest[0] in targets, f"{place}: make has no target {rest[0]}"
        elif first == "python" and rest[0].endswith(".py"):
            script = ROOT / rest[0]
            assert script.is_file(), f"{place}: {rest[0]} does not exist"
            for flag in (word.split("=")[0] for word in rest[1:] if word.startswith("--")):
                assert flag in script.read_text(encoding="utf-8"), f"{place}: {rest[0]} has no {flag}"
        elif first == "pip":
            asked = re.findall(r"(?:loragate|\.)\[([a-z,]+)\]", line)
            assert set(",".join(asked).split(",")) - {""} <= extras, f"{place}: {line}: no such extra"
        else:
            assert first in OTHERS | {"python"}, f"{place}: what is {first}?"
    assert seen >= 40


def test_commands_in_running_text_have_their_flags(in_a_folder_with_configs):
    seen = 0
    for place, line in inline_lines():
        name = line.split()[1]
        seen += 1
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line):
            assert flag in flags_of(name), f"{place}: `{line}`: {name} has no {flag}"
        if not re.search(r"[…|]", line) and re.match(r"loragate [a-z]+ -", line):
            why = refusal(name, words_of(line)[2:])
            assert why is None or " needs " in why, f"{place}: `{line}`: {why}"
    assert seen >= 40


def test_flags_named_alone_exist():
    known = FOREIGN_FLAGS.union(*(flags_of(name) for name in COMMANDS))
    for path in DOCUMENTS:
        for code in re.findall(r"`(-[^`\n]*)`", prose(path)):
            flag = re.match(r"--[a-z][a-z0-9-]*", code)
            assert flag is None or flag[0] in known, f"{path.name}: no command has {flag[0]}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, in_a_folder_with_configs):
    """Every example parses, every setting is described, and the page of the site names them all."""
    found = command(name)
    assert found.name == name
    assert found.examples
    for line in found.examples:
        words = words_of(line)
        assert words[:2] == ["loragate", name]
        options, _ = parse(found, words[2:])
        assert isinstance(options, found.options)
    texts = help_texts(found.options)
    for setting in field_types(found.options):
        assert texts.get(setting, "").strip(), f"{name}: {setting} has no help text"
    page = site().command_page(name)
    for flag in flags_of(name) - {"-h", "--help", "--help-all", "--config", "--print-config", "--debug"}:
        assert f"`{flag}`" in page
    for line in found.examples:
        assert line in page


def test_examples_of_the_overview_parse(in_a_folder_with_configs):
    lines = [line.strip() for line in overview().splitlines() if line.startswith("  loragate ")]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line)
        parse(command(words[1]), words[2:])


PAGES_WITH_PYTHON = [path for path in DOCUMENTS if any(fence.language == "python" for fence in fences(path))]


@pytest.mark.parametrize("path", PAGES_WITH_PYTHON, ids=lambda path: path.name)
def test_python_snippets_run(path, tmp_path, monkeypatch):
    problem = probe_sandbox("bubblewrap") if path.name == "tasks.md" else None
    if problem:
        pytest.skip(f"bubblewrap: {problem}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_base("path/to/base")
    write_adapter("path/to/adapter", "path/to/base")
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(24)))
    namespace = {"__name__": "snippet"}
    # the snippets of the walk need what its commands make, and run there
    for fence in (fence for fence in fences(path) if fence.language == "python" and fence.comment != "walk"):
        reason = re.match(r"not run:(.*)", fence.comment)
        assert reason is None or len(reason[1].split()) >= 3, f"{path.name}:{fence.line}: say why it is not run"
        code = compile(fence.text, f"{path.name}:{fence.line}", "exec")
        if reason is None:
            exec(code, namespace)
            # "expression   # Type(...)" states what comes out
            for expression, shown in re.findall(r"^(\w.*\))\s+# (\w+\(.*\))$", fence.text, re.M):
                assert repr(eval(expression, namespace)) == shown
    if path.name == "README.md":
        assert Path("gated/gate_config.json").is_file()


def test_yaml_and_json_snippets_are_what_they_seem(tmp_path):
    from loragate.evaluation.tasks import load_questions, load_task
    from loragate.recipes import read_recipe

    for fence in blocks("json"):
        for line in fence.text.splitlines():
            assert isinstance(json.loads(line), dict), f"{fence.page.name}:{fence.line}"
    for fence in blocks("yaml"):
        file = re.match(r"# ([\w.-]+\.yaml)", fence.text)
        assert file, f"{fence.page.name}:{fence.line}: a YAML snippet opens with its file's name"
        path = tmp_path / file[1]
        path.write_text(fence.text, encoding="utf-8")
        if file[1] == "tanks.yaml":
            (rows,) = [other.text for other in fences(fence.page) if other.language == "json"]
            (tmp_path / "tanks.jsonl").write_text(rows, encoding="utf-8")
            assert len(load_questions(load_task(path)).questions) == 2
        elif fence.page.name == "recipes.md":
            assert read_recipe(str(path)).stages
        else:
            read_config(path, command(file[1].removesuffix(".yaml")))


def site_slug(heading):
    """The anchor that MkDocs gives a heading."""
    text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def github_slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@functools.cache
def anchors(path):
    """Anchors under which a heading is found both on the site and on GitHub."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        if site_slug(plain) == github_slug(plain):
            found.add(site_slug(plain))
    return found


def test_links_and_named_paths_lead_somewhere():
    checked = 0
    for path in DOCUMENTS:
        text = prose(path)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", re.sub(r"`[^`\n]*`", "", text)):
            page = path.parent / target if target else path
            assert page.exists(), f"{path.name} links to {target}"
            if anchor:
                checked += 1
                assert anchor in anchors(page), f"{path.name}: {target}#{anchor}: there is {sorted(anchors(page))}"
        for target in re.findall(r"`((?:src|tests|benchmarks|scripts|docs|examples)/[\w./-]+)`", text):
            assert (ROOT / target).exists(), f"{path.name} names {target}"
    assert checked >= 10


def pages_of(entry):
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages_of(part)]


@functools.cache
def site():
    return load_script(ROOT / "scripts" / "docs_site.py")


def test_every_page_is_in_the_navigation():
    listed = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md")), "docs/ and the nav of mkdocs.yml differ"


def test_every_name_that_is_public_or_taught_has_its_place_in_the_reference():
    listed = set(re.findall(r"^::: loragate\.([\w.]+)$", (DOCS / "commands.md").read_text(encoding="utf-8"), re.M))
    public = {name for name in loragate.__all__ if not inspect.ismodule(getattr(loragate, name))}
    assert public - {"__version__"} <= listed
    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    taught = {
        f"{module}.{name}"
        for module, names in re.findall(r"^from loragate\.([\w.]+) import (.+)$", pages, re.M)
        for name in names.split(", ")
    }
    assert len(taught) > 15
    for name in taught:
        module, _, last = f"loragate.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), last), name
    # a class may be taught under a shorter path than it is listed under
    listed |= {f"{path.split('.')[0]}.{path.split('.')[-1]}" for path in listed}
    assert taught <= listed


def test_every_error_has_its_place_in_the_reference():
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    listed = re.search(r"^::: loragate\.errors\n    options:\n      members: \[(.*)\]$", page, re.M)
    assert listed is not None
    assert {"LoragateError", *listed[1].split(", ")} == defined


def test_the_table_of_commands_is_that_of_the_commands():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert page == site().with_commands(page, on_site=False)
    assert all(f"| `{name}` | " in page for name in COMMANDS)


def test_links_out_of_the_documentation_are_turned_to_copies():
    page = "see [a](../examples/slurm/sweep.sbatch), [b](../README.md#x), [c](data.md)"
    assert site().outside_links(page) == {"examples/slurm/sweep.sbatch", "README.md"}
    turned = site().inward(page)
    assert turned == "see [a](repository/examples/slurm/sweep.sbatch), [b](repository/README.md.txt), [c](data.md)"


@pytest.mark.slow("documents")
def test_the_site_builds_and_asks_no_network(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for path in DOCS.glob("*.md"):
        assert (tmp_path / f"{path.stem}.html").is_file()
    for name in COMMANDS:
        assert (tmp_path / "commands" / f"{name}.html").is_file()
    for path in tmp_path.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="?((?:https?:)?//[^"\s>]+)', page)
        loaded += re.findall(r'<link[^>]*\shref="?((?:https?:)?//[^"\s>]+)', page)
        assert loaded == [], f"{path.relative_to(tmp_path)} loads {loaded}"
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path.name


@pytest.mark.slow("documents")
def test_the_walk_of_the_five_minutes(tmp_path):
    """The lines and the snippet marked as a walk, in order, as they stand."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    steps = 0
    for fence in fences(DOCS / "five-minutes.md"):
        if fence.comment != "walk":
            continue
        lines = [["-c", fence.text]]
        if fence.language == "sh":
            lines = [["-m", *shlex.split(line)] for line in fence.text.splitlines()]
        for arguments in lines:
            steps += 1
            done = subprocess.run(
                [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    assert steps == 7
    assert json.loads((tmp_path / "gated" / "gate_config.json").read_text())["selection"]
    assert (tmp_path / "report.html").stat().st_size > 10_000
