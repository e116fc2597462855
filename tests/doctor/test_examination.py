"""`examine`: parts in their order, kept as they end, resumed."""

from contextlib import contextmanager

import pytest

import loragate as lg
from loragate.doctor import examination
from loragate.doctor.exam_context import ExamSettings
from loragate.doctor.record import FILE, read_examination
from loragate.errors import ConfigError, DataError
from loragate.gates.adapter_rules import Finding
from tiny import tiny_rows, tiny_tokenizer, write_adapter, write_base, write_rows


@pytest.fixture
def folder(tmp_path):
    write_base(tmp_path / "base", tokenizer=tiny_tokenizer())
    write_adapter(tmp_path / "adapter", tmp_path / "base")
    return tmp_path / "adapter"


def test_an_interrupted_examination_keeps_what_is_known_and_goes_on(folder, tmp_path, monkeypatch):
    out, calls = tmp_path / "out", []

    def first(exam):
        calls.append("first")
        assert exam.has_base
        assert len(exam.greedy_answer_rows("base")) == len(exam.prompts)
        return None, [Finding("never-stops", "warning", "it never stops", "")]

    def second(exam):
        calls.append("second")
        if calls.count("second") == 1:
            raise KeyboardInterrupt
        assert exam.rows
        return None, []

    monkeypatch.setattr(examination, "PARTS", {"answers": first, "effect": second})
    asked = {"data": tiny_rows(8), "out": out}
    with pytest.raises(KeyboardInterrupt):
        lg.examine(folder, **asked)
    before = read_examination(out / FILE)
    assert before.unfinished == ("effect",)
    assert before.verdict == "warnings"
    with pytest.raises(ConfigError, match="--resume"):
        lg.examine(folder, **asked)
    found = lg.examine(folder, **asked, resume=True)
    assert calls == ["first", "second", "second"]
    assert found.unfinished == ()
    assert found.findings == before.findings == read_examination(out / FILE).findings
    with pytest.raises(ConfigError, match="settings"):
        lg.examine(folder, **asked, resume=True, settings=ExamSettings(max_rows=3))


def test_progress_names_the_part_of_the_check_up(folder, monkeypatch):
    names = []

    @contextmanager
    def on_job(name, total=0, unit=""):
        names.append(name)
        yield lambda done, of: None

    parts = {
        "answers": lambda exam: (exam.greedy_answer_rows("base") and None, []),
        "effect": lambda exam: (exam.rows and None, []),
    }
    monkeypatch.setattr(examination, "PARTS", parts)
    lg.examine(folder, data=tiny_rows(8), on_job=on_job)
    assert names == ["[1/2] loading the model", "[1/2] answers of the base"]


def test_a_folder_that_cannot_be_loaded_is_a_finding_and_not_an_error(folder):
    (folder / "adapter_model.safetensors").unlink()
    found = lg.examine(folder)
    assert found.verdict == "broken"
    assert found.findings[0].code == "weights-absent"
    assert set(found.unfinished) == set(examination.PARTS)


def test_rows_of_no_format_are_refused_before_the_folder_is_begun(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(examination, "PARTS", {"answers": None})
    with pytest.raises(DataError, match="fit no known row format"):
        lg.examine(folder, data=[{"left": "a", "right": "b"}], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quick", [False, True])
def test_a_folder_of_something_else_is_refused(folder, quick):
    with pytest.raises(ConfigError, match="is not empty"):
        lg.examine(folder, out=folder, quick=quick)


def test_the_dev_set_is_judged_as_asked_and_named(folder, tmp_path, monkeypatch):
    def asked(exam):
        assert exam.settings.dev.dev_grader == "exact"
        return None, []

    monkeypatch.setattr(examination, "PARTS", {"answers": asked})
    bare = write_rows(tmp_path / "d3.jsonl", [{"prompt": "why?"}])
    with pytest.raises(ConfigError, match=r"d3\.jsonl has no answers"):
        lg.examine(folder, dev_data=bare)
    dev = [{"prompt": f"w{at} w1", "answer": "w3"} for at in range(40)]
    settings = ExamSettings(dev_grader="exact")
    assert lg.examine(folder, dev_data=dev, settings=settings).unfinished == ()
    with pytest.raises(ConfigError, match="--dev-grader nonsense"):
        lg.examine(folder, dev_data=dev, settings=ExamSettings(dev_grader="nonsense"))


def test_questions_that_cannot_be_asked_are_refused_before_the_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(examination, "PARTS", {"answers": None})
    with pytest.raises(DataError, match=r"retention set .* has 3 different questions"):
        lg.examine(folder, retention_data=[{"prompt": f"{number}?", "answer": number} for number in range(3)])
