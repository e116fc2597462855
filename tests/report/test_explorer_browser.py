"""The explorer in a real headless Chromium, on a tiny gated adapter: ask, recolour, move a bound."""

import shutil

import pytest

from loragate.errors import ConfigError
from loragate.models import Loading
from loragate.report.explorer import Ask, build_explorer, lambdas, launch
from loragate.serving.explore import Session, explorer_of
from tiny import tiny_gated, tiny_tokenizer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def session():
    return Session(tiny_gated(-6, 3, 0.5), tiny_tokenizer(), raw=True, system="none")


def test_answers_are_those_of_the_three_models(session):
    record = session.respond(Ask("one two", 0.0, 6, 0, -6.0, 3.0))
    answers = {answer["variant"]: answer for answer in record["questions"][0]["answers"]}
    assert list(answers) == ["base", "adapter", "gated"]
    plain = session.respond(Ask("one two", 0.0, 6, 0, 1.0, 1.0))
    assert plain["token_ids"]["gated"] == record["token_ids"]["adapter"]
    off = session.respond(Ask("one two", 0.0, 6, 0, 0.0, 0.0))
    assert off["token_ids"]["gated"] == record["token_ids"]["base"]


def test_rereading_keeps_the_answers_and_changes_lambda(session):
    record = session.respond(Ask("one two", 1.0, 6, 3, -6.0, 3.0))
    again = session.reread(record, 0.0, 1.0)
    assert again["token_ids"] == record["token_ids"]
    count = len(record["modules"])
    before, after = (lambdas(r["questions"][0]["answers"][2], count, -6.0, 3.0) for r in (record, again))
    assert any(value < -0.1 for row in before for value in row)
    step = 9 / 255
    assert all(-step <= value <= 1 + step for row in after for value in row)
    # the first module reads the embeddings, which no gate changes; later ones see other inputs
    assert after[0] == pytest.approx([min(max(value, 0.0), 1.0) for value in before[0]], abs=step)


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
    from loragate.gates.attach import gate_modules

    modules = list(gate_modules(session.model))
    page = build_explorer(
        session.respond, session.reread, lower=-6, upper=3, modules=modules, prompt="one two", max_new_tokens=6
    )
    address = launch(page, 0, wait=False)
    assert address.startswith("http://127.0.0.1:")
    requests, errors = [], []
    colours_of = (
        "() => JSON.stringify([...document.querySelectorAll(\"span[title*='λ']\")].map(s => s.style.backgroundColor))"
    )
    try:
        with playwright.sync_playwright() as program:
            browser = program.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            tab = browser.new_page()
            tab.on("request", lambda request: requests.append(request.url))
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.goto(address)
            tab.get_by_role("button", name="Compare").click()
            tab.wait_for_selector("span[title*='λ']", timeout=60_000)
            assert tab.locator("span[title*='λ']").count() >= 3
            gates = tab.evaluate(colours_of)
            tab.get_by_label("range slider for λ at least").focus()
            tab.keyboard.press("End")  # every λ is 3 now
            tab.get_by_role("button", name="Compare").click()
            tab.wait_for_function(f"before => ({colours_of})() !== before", arg=gates, timeout=60_000)
            extrapolated = tab.evaluate(colours_of)
            assert "214, 118, 20" in extrapolated
            assert "123, 77, 160" not in extrapolated
            tab.get_by_label("Colour").click()
            tab.get_by_role("option", name="entropy", exact=True).click()
            tab.wait_for_function(f"before => ({colours_of})() !== before", arg=extrapolated, timeout=60_000)
            browser.close()
    finally:
        page.close()
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []
    assert errors == []
