"""The explorer in a real headless Chromium, on a tiny gated adapter: ask, recolour, move a bound."""

import base64
import shutil
from functools import partial

import numpy as np
import pytest

from loragate.errors import ConfigError
from loragate.models import Loading
from loragate.serving import explore
from loragate.serving.explore import Session, build_explorer, explorer_of, launch
from tiny import tiny_gated, tiny_tokenizer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def lambdas(answer, modules):
    raw = np.frombuffer(base64.b64decode(answer["gates"]), dtype=np.uint8).reshape(modules, -1)
    return -6 + raw / 255 * 9


@pytest.fixture(scope="module")
def session():
    return Session(tiny_gated(-6, 3, 0.5), tiny_tokenizer(), raw=True, system="none")


def test_answers_are_those_of_the_three_models(session):
    record = session.respond("one two", 0.0, 6, 0, -6.0, 3.0)
    answers = {answer["variant"]: answer for answer in record["questions"][0]["answers"]}
    assert list(answers) == ["base", "adapter", "gated"]
    plain = session.respond("one two", 0.0, 6, 0, 1.0, 1.0)
    assert plain["token_ids"]["gated"] == record["token_ids"]["adapter"]
    off = session.respond("one two", 0.0, 6, 0, 0.0, 0.0)
    assert off["token_ids"]["gated"] == record["token_ids"]["base"]


def test_rereading_keeps_the_answers_and_changes_lambda(session):
    record = session.respond("one two", 1.0, 6, 3, -6.0, 3.0)
    again = session.reread(record, 0.0, 1.0)
    assert again["token_ids"] == record["token_ids"]
    count = len(record["modules"])
    before, after = (lambdas(r["questions"][0]["answers"][2], count) for r in (record, again))
    assert before.min() < -0.1
    step = 9 / 255
    assert -step <= after.min() <= after.max() <= 1 + step
    # the first module reads the embeddings, which no gate changes; later ones see other inputs
    assert after[0] == pytest.approx(before[0].clip(0, 1), abs=step)


def test_it_is_kept_why_each_answer_ended_and_how_much_of_it_is_not_shown(session, monkeypatch):
    record = session.respond("one two", 0.0, 6, 0, -6.0, 3.0)
    ended = [answer["finish_reason"] for answer in record["questions"][0]["answers"]]
    assert "length" in ended
    answers = record["questions"][0]["answers"]
    mixed = [{**one, "finish_reason": reason} for one, reason in zip(answers, ("stop", "eos", "length"), strict=True)]
    kept = {**record, "questions": [{**record["questions"][0], "answers": mixed}]}
    again = session.reread(kept, 0.0, 1.0)["questions"][0]["answers"]
    assert [answer["finish_reason"] for answer in again] == ["stop", "eos", "length"]
    monkeypatch.setattr(explore, "trace_answers", partial(short_traces, explore.trace_answers))
    cut = session.reread(record, -6.0, 3.0)["questions"][0]["answers"]
    assert [len(answer["tokens"]) for answer in cut] == [4, 4, 4]
    assert [answer["cut"] for answer in cut] == [len(ids) - 4 for ids in record["token_ids"].values()]


def short_traces(trace, *args, max_tokens):
    return trace(*args, max_tokens=4)


def test_a_folder_without_gates_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no gated folder"):
        explorer_of(str(tmp_path), Loading())


@pytest.mark.slow("browsers")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt install chromium)")
def test_in_the_browser(session):
    pytest.importorskip("gradio", reason="gradio is not installed (pip install loragate[explore])")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    page = build_explorer(session, prompt="one two", max_new_tokens=6)
    address = launch(page, 0, wait=False)
    assert address.startswith("http://127.0.0.1:")
    requests, errors = [], []
    colours = "spans => JSON.stringify(spans.map(span => span.style.backgroundColor))"
    try:
        with playwright.sync_playwright() as program:
            browser = program.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            tab = browser.new_page()
            tab.on("request", lambda request: requests.append(request.url))
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.goto(address)
            tab.get_by_role("button", name="Compare").click()
            view = tab.frame_locator("iframe")
            view.locator(".token").first.wait_for(timeout=60_000)
            assert view.locator(".answer").count() == 3
            before = view.locator(".token").evaluate_all(colours)
            view.get_by_label("Module").select_option(index=1)
            tab.get_by_label("range slider for λ at least").focus()
            tab.keyboard.press("End")  # every λ is 3 now
            tab.get_by_role("button", name="Compare").click()
            view.locator(".token[style*='214, 118, 20, 0.85']").first.wait_for(timeout=60_000)
            extrapolated = view.locator(".token").evaluate_all(colours)
            assert extrapolated != before
            assert "123, 77, 160" not in extrapolated
            assert view.get_by_label("Module").evaluate("box => box.selectedIndex") == 1, "what was chosen stays"
            browser.close()
    finally:
        page.close()
    assert [url for url in requests if not url.startswith((address, "data:", "blob:", "about:"))] == []
    assert errors == []
