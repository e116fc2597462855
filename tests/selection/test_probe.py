"""The probe: what it scores, what it refuses, and how a majority becomes one."""

import dataclasses

import pytest
from selection_kit import probe, put, questions, sample

from loragate.errors import ConfigError, DataError
from loragate.evaluation.tasks import Question, load_task
from loragate.generation import SamplingConfig
from loragate.selection.probe import COOL, COOL_SAMPLES, by_agreement, looks_worse, signs_of
from loragate.selection.questions import (
    key_of,
    probe_task,
    prompts_of,
    prompts_to_exclude,
    require_disjoint,
)

SAMPLING = SamplingConfig(samples=2, seed=5)


class Told:
    """An engine that gives the texts it was told, [questions][samples]."""

    def __init__(self, texts):
        self.texts, self.asked = texts, []

    def generate(self, prompts, config, on_progress=None, **_):
        self.asked.append((list(prompts), config))
        return [
            sample(q, i, self.texts[q][i % len(self.texts[q])])
            for q in range(len(prompts))
            for i in range(config.samples)
        ]


def agreement(texts, tmp_path=None, task=None, asked=None):
    asked = asked or questions(len(texts))
    engine = Told(texts)
    kept = None if tmp_path is None else tmp_path / "majority.json"
    task = task or probe_task("exact", labelled=False)
    return by_agreement(put(task, asked, SAMPLING), engine, None, kept), engine


def test_scores_are_ordered_by_question_and_sample():
    texts = [["w3", "w9"]] + [["w9", " w3 "]] + [["w9", "w9"]] * 30
    found = probe().score(Told(texts))
    assert found.scores.shape == (32, 2)
    assert found.scores[:3].tolist() == [[1, 0], [0, 1], [0, 0]]
    assert found.signs["read"] == 1.0


def test_signs():
    samples = [
        *(sample(0, 0, "a", 2), sample(0, 1, "b", 4, finished=False)),
        *(sample(1, 0, "a", 2), sample(1, 1, "a", 4)),
    ]
    signs = {"finished": 0.75, "tokens": 3.0, "distinct": 0.75, "varied": 0.5, "repeated": 0.0, "read": 0.25}
    assert signs_of(samples, [None, "a", None, None]) == signs


def test_fewer_different_answers_are_told_of_only_among_as_many():
    own = {"finished": 1.0, "tokens": 3.0, "distinct": 1.0, "varied": 0.16, "repeated": 0.0, "read": 1.0}
    now = {**own, "varied": 0.06}
    assert looks_worse(now, own) == [
        "on the probe 6% of the answers are different ones, 16% at the start (the adapter)"
    ]
    assert looks_worse(now, own, alike=False) == []


def test_a_greedy_probe_has_one_sample():
    one = put(probe_task("exact"), questions(), SamplingConfig(temperature=0.0, samples=1))
    assert one.score(Told([["w3"]] * 32)).scores.mean() == 1


def test_rows_that_the_tiny_grader_cannot_read():
    with pytest.raises(ConfigError, match="the column 'kind'"):
        agreement([["w3"]] * 32, task=probe_task("tiny", labelled=False))


def test_the_fingerprint_sees_what_decides_a_score():
    base = probe()
    other = [
        probe(33),
        probe(samples=3),
        probe(seed=2),
        dataclasses.replace(base, task=probe_task("choice")),
        dataclasses.replace(base, questions=(dataclasses.replace(base.questions[0], gold="w4"), *base.questions[1:])),
        dataclasses.replace(
            base, questions=(dataclasses.replace(base.questions[0], row={"test": "2"}), *base.questions[1:])
        ),
    ]
    assert probe().fingerprint == base.fingerprint
    assert len({item.fingerprint for item in [base, *other]}) == 7


def test_the_majority_becomes_the_label():
    texts = [["w3"] * 6 + ["w9"] * 2] * 20 + [["w5"]] * 15 + [[f"w{i}" for i in range(8)]] * 5
    found, engine = agreement(texts)
    assert found.kind == "agreement"
    assert [q.gold for q in found.questions] == ["w3"] * 20 + ["w5"] * 15, "no majority, no question"
    assert len(found.prompts) == 35
    assert found.as_dict()["majority_share"] == pytest.approx((20 * 0.75 + 15) / 35)
    ((_, config),) = engine.asked
    assert (config.temperature, config.samples) == (COOL, COOL_SAMPLES)
    assert config.seed != SAMPLING.seed
    assert found.score(Told([["w3"]] * 35)).scores.mean() == pytest.approx(20 / 35)


def test_agreement_that_cannot_select_says_why():
    free_text = [[f"w{q} w{i}" for i in range(8)] for q in range(40)]
    for texts, words in ((free_text, "only 0 questions"), ([[""]] * 40, "only 0 % of")):
        with pytest.raises(ConfigError, match=words):
            agreement(texts)
    engine = Told([["w3"]] * 32)
    with pytest.raises(ConfigError, match="programs"):
        by_agreement(put(load_task("mbpp"), questions(32), SAMPLING), engine)
    assert engine.asked == []


def test_the_majority_is_kept_for_a_resumed_selection(tmp_path):
    first, engine = agreement([["w3"]] * 32, tmp_path)
    again, silent = agreement([["w4"]] * 32, tmp_path)
    assert (len(engine.asked), len(silent.asked)) == (1, 0)
    assert again.fingerprint == first.fingerprint
    other, asked = agreement([["w4"]] * 33, tmp_path)
    assert len(asked.asked) == 1, "other questions are asked again"
    assert other.questions[0].gold == "w4"


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("What is 2 + 3?", "what  is\n2+3", True),
        ("What is 2 + 3?", "What is 2 - 3?", False),
        ("add 1 23", "add 12 3", False),
        ("ＡＢＣ １", "abc 1", True),
        ('"Sort the list."', "sort the list", True),
    ],
)
def test_what_counts_as_the_same_question(left, right, same):
    assert (key_of(left) == key_of(right)) is same


def shared_with(asked, others):
    """Whether a probe of one question is refused because it is among others."""
    try:
        require_disjoint([asked], others, "the training rows")
    except DataError:
        return True
    return False


def test_shared_questions_are_found_in_every_row_format():
    rows = [
        {"messages": [{"role": "user", "content": "first Question"}, {"role": "assistant", "content": "an answer"}]},
        {"conversations": [{"from": "human", "value": "second question"}, {"from": "gpt", "value": "another answer"}]},
        {"prompt": "third question", "completion": "x"},
        {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fourth question"}]},
        {"instruction": "Translate", "input": "fifth question", "output": "x"},
    ]
    texts = prompts_of(rows)
    assert texts == [
        "first Question",
        "second question",
        "third question",
        "fourth question",
        "Translate\nfifth question",
    ]

    def question(text, row=None):
        return Question("0", text, "", row or {}, "probe.jsonl:4")

    for text in (
        "first question",
        "SECOND  question.",
        "third question",
        "fourth question?",
        "translate fifth question",
    ):
        assert shared_with(question(text), texts), text
    for text in ("an answer", "be brief", "translate", "sixth question", "?"):
        assert not shared_with(question(text), [*texts, "", "!"]), text
    with pytest.raises(DataError, match=r"probe.jsonl:4: 1 of 2 probe questions are also among the training rows"):
        require_disjoint([question("new"), question("Third question")], texts, "the training rows")
    require_disjoint([question("new")], [], "nothing at all")


def test_wrapped_questions_are_recognised():
    long = "A train leaves at nine and another one leaves at ten; when do the two of them meet on the way?"
    asked = Question("0", f"Solve this.\n{long}", "", {"problem": long}, "p:1")
    assert shared_with(asked, [long.upper()]), "a task's template does not hide the row's own question"
    bare = Question("0", long, "", {}, "p:1")
    assert shared_with(bare, [f"{long}\nPlease reason step by step."]), "nor does the template of the training rows"
    short = Question("0", "w1 w2", "", {}, "p:1")
    assert not shared_with(short, ["w1 w2 w3"])


def test_a_check_against_nothing_is_refused():
    with pytest.raises(DataError, match=r"no prompts were found in test.jsonl.*prompt, question"):
        prompts_to_exclude([{"text": "w1"}], "test.jsonl")
