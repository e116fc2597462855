"""The model card: what it says, front matter that the hub reads, and names that try to be markup."""

import re

import pytest
import yaml

from loragate.gates.card import render_card

SCORE = {"mean": 0.5, "low": 0.4, "high": 0.6}
HOSTILE = [
    "a\n---\nlicense: evil",
    'quote " and \\ back',
    "<script>alert(1)</script>",
    "[click](javascript:x)",
    "a | b | c",
    "`tick` ``two``",
    "line\u2028two\x00\x1b[31m",
    "{{ 7 * 7 }} {% raw %}",
    "- list: {a: b} # no",
    "ünïcødé 😀",
    "&amp; *bold* _it_ $x$ ~~no~~",
]


def a_record(base="owner/base", **evidence):
    return {
        "gate": {"lower": -3, "upper": 1.0, "tau": 1.0, "granularity": "token"},
        "k": 100,
        "base": {"id": base, "revision": "abc", "quantization": "none"},
        "adapter": {"sha256": "f" * 64, "rank": 16, "alpha": 16, "id": "owner/adapter"},
        "modules": ["q", "v"],
        "parity": None,
        "selection": None,
        "training": None,
        **evidence,
    }


def full(label="gated [-3,1] greedy", weights="gates", why="forgets"):
    training = {
        "settings": {"objective": "entropy", "batch_size": 128, "learning_rate": 5e-4},
        "entropy_before": 0.31234,
        "entropy_after": 0.2,
        "gates": {"below_zero": 0.1, "zero_to_one": 0.6, "above_one": 0.3},
        "steps": 157,
        "parameters": 1234,
        "rows": 20000,
        "response_tokens": 4_000_000,
        "data": {"source": "train.jsonl"},
    }
    kept = {"mean": 0.7, "low": 0.6, "high": 0.8}
    selection = {
        "rule": "all variants greedily, then more",
        "recommendation": {"label": label, "weights": weights, "temperature": 0.0, "reason": "it beats the adapter"},
        "baseline": "adapter greedy",
        "variants": [
            {"label": "adapter greedy", **SCORE, "no_eos": 0.03, "tokens": 210.4, "retention": SCORE},
            {"label": label, **SCORE, "mean": 0.55, "retention": kept},
        ],
        "dev": {"questions": 100},
        "retention": {"vetoed": {"gated [-6,3] greedy": why}},
        "left_out": {"base": "the adapter changes embed_tokens"},
        "diverged": {"[0,6], seed 42": "the loss is not finite"},
    }
    return a_record(training=training, selection=selection)


def front(card):
    matter = re.match(r"\A---\n(.*?)\n---\n", card, re.S)
    return yaml.safe_load(matter[1])


def test_everything_measured_is_said():
    card = render_card("my-gates", full())
    assert front(card) == {
        "library_name": "loragate",
        "base_model": "owner/base",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "peft", "loragate", "scale"],
    }
    for words in (
        "# my-gates",
        "λ in [-3, 1]",
        "rank 16, α 16, sha256 `ffffffffffff`…",
        "1,234 parameters",
        "recommended on a dev set: gated [-3,1] greedy; it beats the adapter",
        "train.jsonl, 20,000 rows, 4,000,000 response tokens",
        "top-100 entropy (SCALE)",
        "157 of batch 128, learning rate 0.0005",
        "0.312 before, 0.200 after",
        "On 100 dev questions; all variants greedily, then more.",
        "| adapter greedy | 50.0 | 40.0–60.0 | 97 | 210 | 50.0 | 40.0–60.0 |",
        "| gated [-3,1] greedy | 55.0 | 40.0–60.0 |  |  | 70.0 | 60.0–80.0 |",
        "- gated [-6,3] greedy was not taken: it forgets.",
        "- base is left out: the adapter changes embed_tokens.",
        "- The training of [0,6], seed 42 diverged: the loss is not finite.",
        "no evidence of better answers",
        "flattered by the choice",
        "arXiv:2609.33463",
        "No license is named",
    ):
        assert words in card, words
    assert "\n\n\n" not in card
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {3, 8}, "two tables, each with one width"


def test_gates_that_are_off_and_a_choice_of_the_user_are_called_so():
    card = render_card("off", full("adapter greedy", "adapter"))
    assert "answers exactly as the plain adapter" in card
    assert "flattered" not in card
    card = render_card("given", a_record(selection={"reason": "given with --skip-selection"}))
    assert "| how the range was chosen | given with --skip-selection |" in card


@pytest.mark.parametrize(
    ("label", "weights", "part", "opening"),
    [
        (
            "base greedy",
            "base",
            None,
            "that is off: λ = 0 everywhere, so this folder answers exactly as the base does. Nothing was trained for it.",
        ),
        (
            "adapter λ=0.5 greedy",
            "scale",
            None,
            "with one λ for all modules, which nothing was trained for: adapter λ=0.5 greedy.",
        ),
        (
            "adapter lower λ=0.5 greedy",
            "scale",
            "lower",
            "with one λ for the lower third of the layers and the adapter as it is in the others, which nothing was trained "
            "for: adapter lower λ=0.5 greedy.",
        ),
    ],
)
def test_the_base_and_a_fixed_strength_are_called_so(label, weights, part, opening):
    selection = full(label, weights)["selection"]
    selection["recommendation"]["part"] = part
    card = render_card("fixed", a_record(selection=selection))
    assert f"A LoRA adapter on `owner/base` {opening}\n" in card
    assert f"| how this was chosen | recommended on a dev set: {label}; it beats the adapter |" in card
    assert "The λ belongs to this adapter on this base" in card
    for absent in ("range of λ", "| training |", "entropy gates", "The gates belong", "Lower entropy", "\n\n\n"):
        assert absent not in card


@pytest.mark.parametrize("base", ["/home/me/base", "", "../base", "a/b/c", *HOSTILE])
def test_a_base_that_is_no_hub_id_stays_out_of_the_front_matter(base):
    card = render_card("x", a_record(base=base))
    assert "base_model" not in front(card)
    assert front(card)["library_name"] == "loragate"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_are_shown_and_not_obeyed(text):
    record = full(text, why=text)
    record["training"]["data"]["source"] = text
    record["adapter"]["id"] = text
    card = render_card(text, record)
    assert "license" not in front(card)
    outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", card)  # code spans show what they hold
    assert "<script" not in outside
    assert not re.search(r"(?<!\\)\]\(javascript", outside)
    assert " 49" not in card
    for line in card.splitlines():
        assert not re.search(r"[\x00-\x08\x1b\u2028]", line)
        if line.startswith("| ") and "|---" not in line:
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 8), line


@pytest.mark.parametrize("broken", [3, "text", [], {"variants": 3}, {"dev": 4, "variants": [3, {"mean": "x"}]}])
def test_evidence_of_another_kind_is_left_out(broken):
    assert "## Limits" in render_card("x", a_record(selection=broken, training=broken))
