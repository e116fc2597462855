"""The figures of docs/serving.md, and the one of them that docs/faq.md repeats, are those of the committed results."""

from pathlib import Path

import pytest

from tiny import load_script

SERVING = Path(__file__).parents[2] / "benchmarks" / "serving"


@pytest.fixture(scope="module")
def page():
    return load_script(SERVING / "page.py")


def test_the_page_shows_the_results_as_they_are(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert [mark[1] for mark in page.MARKS.findall(text)] == ["throughput", "clients", "agreement", "rounding"]
    assert page.filled(text) == text, "run python benchmarks/serving/page.py"


def test_nobody_was_given_the_answer_of_another(page):
    for name in ("load_vllm", "load_transformers"):
        found = page.load(name)
        assert (found["errors"], found["replies_that_differ"]) == (0, 0), name
        assert found["distinct_answers_per_prompt_median"] > 2, name


def test_the_bound_holds_in_the_results(page):
    assert page.largest_difference() < 1e-4
    cases = page.load("agreement")["largest_difference_of_a_log_prob"]
    assert set(cases) == set(page.CASES)
    assert not any(one["other_greedy_choices"] for case in cases.values() for one in case.values())


def test_the_answers_to_questions_name_the_largest_difference(page):
    assert f"at most {page.largest_difference():.1e} " in page.FAQ.read_text(encoding="utf-8")
