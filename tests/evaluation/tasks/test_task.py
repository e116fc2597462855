from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from loragate.errors import ConfigError
from loragate.evaluation.tasks import load_questions, load_task, suite, task_names
from loragate.evaluation.tasks.task import SUITES, Generation

DOCUMENT = Path(__file__).parents[3] / "docs" / "tasks.md"
TASK = """\
name: sums
version: 2
suite: math
dataset:
  file: sums.jsonl
  rows: 2
  schema:
    question: text
    answer: text|number
columns:
  question: question
  gold: answer
prompt: "{{ question }} Use \\\\boxed{}."
generation: {samples: 4, temperature: 1, max_new_tokens: 64}
grader: default
"""
HARNESS = """\
name: letters
version: 1
suite: retention
grader: lm-eval
dataset: {hub: owner/letters, rows: 3, schema: {text: text}}
columns: {gold: text}
harness: {files: letters.yaml, metric: "acc,none"}
"""


@pytest.fixture
def task_file(tmp_path):
    def write(text=TASK):
        path = tmp_path / "sums.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def changed(old, new, text=TASK):
    assert old in text
    return text.replace(old, new, 1)


def test_built_in_tasks():
    names = task_names()
    assert [load_task(name).name for name in names] == names
    by_suite = {name: [task.name for task in suite(name)] for name in (*SUITES, "all")}
    assert by_suite == {
        "math": ["aime24", "amc23", "math500", "minerva", "olympiadbench"],
        "code": ["humaneval", "humaneval_plus", "mbpp"],
        "retention": ["bbh", "mmlu_pro", "openbookqa"],
        "arithmetic": ["arithmetic"],
        "tiny": ["tiny"],
        "tiny_retention": ["tiny_retention"],
        "all": sorted(set(names) - {"humaneval_raw", "bbh_zeroshot", "mbpp_sanitized", "mbpp_plus"}),
    }
    assert len({load_task(name).fingerprint for name in names}) == len(names)


@pytest.mark.parametrize("name", task_names())
def test_what_every_built_in_task_promises(name, tmp_path):
    task = load_task(name)
    assert task.notes
    assert task.dataset.license
    assert task.dataset.rows
    if task.dataset.hub and not name.startswith("bbh"):
        assert re.fullmatch("[0-9a-f]{40}", task.dataset.revision or "")
    if task.suite == "math":
        assert task.generation == Generation(16, 1.0, 1.0, 4096)
        assert task.system is None
        assert task.prompt.endswith("\nPlease reason step by step, and put your final answer within \\boxed{}.")
    assert task.raw == (name == "humaneval_raw")
    assert bool(task.generation.stop) == (task.raw or name[:3] in ("bbh", "mml"))
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(json.loads(json.dumps(task.as_dict()))), encoding="utf-8")
    assert dataclasses.replace(load_task(copy), path=task.path) == task
    assert task.variant_of is None or load_task(task.variant_of).suite == task.suite


def test_fingerprint_follows_content_not_prose_or_place(task_file, tmp_path):
    first = load_task(task_file()).fingerprint
    other = tmp_path / "elsewhere.yml"
    other.write_text(TASK + "notes: something\npaper: silent\n", encoding="utf-8")
    assert load_task(other).fingerprint == first
    assert load_task(task_file(changed("temperature: 1", "temperature: 1.0"))).fingerprint == first
    for old, new in [("version: 2", "version: 3"), ("Use", "use"), ("max_new_tokens: 64", "max_new_tokens: 65")]:
        assert load_task(task_file(changed(old, new))).fingerprint != first
    task = load_task("aime24")
    moved = dataclasses.replace(task, dataset=dataclasses.replace(task.dataset, revision="main"))
    assert moved.fingerprint != task.fingerprint


MISTAKES = [
    (changed("prompt:", "promt:"), r"sums.yaml: unknown key 'promt'; did you mean 'prompt'\? known are name, version"),
    (changed('prompt: "{{ question }} Use \\\\boxed{}."\n', ""), "sums.yaml: missing prompt"),
    (
        changed("suite: math", "suite: maths"),
        r"suite must be one of 'math', 'code'.*found 'maths'; did you mean 'math'\?",
    ),
    (
        changed("grader: default", "grader: defualt"),
        r"grader must be one of .* found 'defualt'; did you mean 'default'\?",
    ),
    (
        changed("{{ question }}", "{{ qestion }}"),
        r"prompt uses 'qestion', which dataset.schema does not have; did you mean 'question'\?",
    ),
    (changed("{{ question }}", "{{ gold }}"), "prompt uses 'gold'"),
    (changed("{{ question }}", "{{ question"), "sums.yaml: prompt: line 1 of the template"),
    (
        changed("gold: answer", "gold: anser"),
        r"columns.gold names the column 'anser', which dataset.schema does not have; did you mean 'answer'\?",
    ),
    (
        changed("    answer: text|number", "    answer: txt|number"),
        r"column 'answer' has the unknown type 'txt'; did you mean 'text'\?",
    ),
    (changed("  file: sums.jsonl\n", ""), "exactly one of hub, file and generator; found none"),
    (changed("  rows: 2", "  split: test"), "split has no effect without hub"),
    (changed("temperature: 1", "temperature: 0"), "samples is 4, but greedy samples are all the same"),
    (changed("samples: 4", "samples: 4, stop: ['\\n']"), "generation.stop is for raw: true"),
    (changed("version: 2", "version: 2\nraw: true\nsystem: hi"), "system has no effect with raw"),
    (
        changed("version: 2", "version: 2\nharness: {files: c, metric: b}"),
        "harness has no effect with grader default, only with lm-eval",
    ),
    (changed("version: 2", "version: 2\nversion: 3"), "not valid YAML .*the key 'version' appears twice"),
    (HARNESS + "prompt: hi\n", "prompt has no effect with grader lm-eval"),
    (changed(', metric: "acc,none"', "", HARNESS), "the key 'harness.metric' is missing"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[str(number) for number in range(len(MISTAKES))])
def test_mistakes_are_named(task_file, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_task(task_file(text))
    assert "sums.yaml" in str(caught.value)


def test_unknown_names(tmp_path):
    with pytest.raises(
        ConfigError, match=r"unknown task 'math50'; did you mean 'math500'\? Known: aime24.*path of its"
    ):
        load_task("math50")
    with pytest.raises(ConfigError, match=r"unknown suite 'mathh'; did you mean 'math'\? Known: math, code"):
        suite("mathh")
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_task(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_task(tmp_path / "binary.yaml")


def test_yaml_tags_run_nothing(task_file):
    with pytest.raises(ConfigError, match=r"not valid YAML"):
        load_task(task_file(changed("name: sums", "name: !!python/object/apply:os.getcwd []")))


def test_the_page_lists_every_task():
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in task_names():
        task = load_task(name)
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        where = task.dataset.hub or ("local" if task.dataset.file else "generated")
        assert where in cells[1], name
        assert str(task.dataset.rows) == cells[2].replace(",", ""), name
        assert task.grader in cells[4], name


def test_the_example_of_the_page(tmp_path):
    text = DOCUMENT.read_text(encoding="utf-8")
    (definition,) = re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, re.S)
    (rows,) = re.findall(r"```jsonl?\n(.*?)```", text, re.S)
    task_path = tmp_path / definition[0]
    task_path.write_text(definition[1], encoding="utf-8")
    task = load_task(task_path)
    (tmp_path / task.dataset.file).write_text(rows, encoding="utf-8")
    loaded = load_questions(task)
    assert loaded.warnings == ()
    assert [question.gold for question in loaded.questions] == ["16", "1/3"]
    assert loaded.questions[0].prompt.startswith("A tank holds")
    assert loaded.questions[0].id == "tank"
