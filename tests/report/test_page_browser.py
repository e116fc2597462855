"""The report in a real headless Chromium: every control used, no console message, nothing stolen, fits a phone."""

import base64
import shutil

import pytest
from test_page import whole_page

from examinations import examination
from loragate.report.blocks import Section, build_page, tokens_block
from loragate.report.examination import write_page
from pages import traces

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow("browsers"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt install chromium)"),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    with playwright.sync_playwright() as program:
        browser = program.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """opens(text, **context options) -> page; fails on any console message, error or request beyond the file."""
    pages, heard = [], []

    def opens(text, **options):
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(**options)
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file://", "data:")) else heard.append(request.url),
        )
        page.goto(file.as_uri())
        pages.append(context)
        return page

    yield opens
    for context in pages:
        context.close()
    assert heard == []


def test_every_control_works_and_hostile_text_does_nothing(opened):
    page = opened(whole_page())
    for box in ("#token-question", "#token-colour"):
        for value in page.locator(f"{box} option").evaluate_all("options => options.map(o => o.value)"):
            page.select_option(box, value)
            assert page.locator(".answer").count() == 3
    page.select_option("#token-colour", "gates")
    for index in range(page.locator("#token-module option").count()):
        page.select_option("#token-module", index=index)
    for token in page.locator(".token").all():
        token.hover()
    for summary in page.locator("details > summary").all():
        summary.click()
    assert page.locator("details[open]").count() == page.locator("details").count() > 0
    for link in page.locator("nav a").all():
        link.click()
    assert page.evaluate("window.stolen") is None
    assert page.locator("img").count() == 0


def test_the_token_view_shows_the_numbers_of_the_record(opened):
    page = opened(whole_page())
    page.select_option("#token-module", label="model.layers.0.mlp.up_proj")
    first = page.locator(".stream").nth(2).locator(".token").nth(1)
    first.hover()
    told = page.locator("#token-details").inner_text()
    assert "Gated token 2 of 5" in told
    assert "log-probability -1.250" in told
    assert "entropy 0.500" in told
    assert "ΔH -0.500" in told
    assert "-6.000" in told
    assert "0.750" in told
    assert "negative" in first.get_attribute("class")
    page.select_option("#token-module", label="all modules, mean")
    page.locator(".stream").nth(2).locator(".token").nth(1).hover()
    assert "-1.500" in page.locator("#token-details").inner_text()
    assert "✓ right" in page.locator(".answer").nth(2).inner_text()
    assert "✗ wrong" in page.locator(".answer").nth(0).inner_text()


def test_an_answer_without_a_token_says_so(opened):
    nothing = {key: [] for key in ("tokens", "log_prob", "entropy", "delta_entropy", "top")}
    page = opened(token_view(-6.0, 3.0, gates="", **nothing))
    assert "This answer has no token." in page.locator(".answer").inner_text()


PURPLE, ORANGE = "rgba(123, 77, 160, 0.85)", "rgba(214, 118, 20, 0.85)"
NONE = "rgba(214, 118, 20, 0)"
HELD = base64.b64encode(bytes([0, 109, 255])).decode()  # λ at L, at the 109th of 255 steps, and at U


def token_view(lower, upper, gates=HELD, **more):
    """A page with one gated answer of three tokens to one module."""
    record = traces(questions=1, tokens=3, modules=("model.layers.0.mlp.up_proj",))
    answer = {**record["questions"][0]["answers"][2], "gates": gates, **more}
    record |= {"lower": lower, "upper": upper, "questions": [{**record["questions"][0], "answers": [answer]}]}
    return build_page("t", None, [Section("tokens", "Tokens", [tokens_block(record)])])


@pytest.mark.parametrize(
    ("lower", "upper", "labels", "ends", "middle_is_reversed"),
    [
        (-6, 3, ["−6", "1", "3"], (PURPLE, ORANGE), True),
        (-4, 4, ["−4", "1", "4"], (PURPLE, ORANGE), True),
        (-3, 4, ["−3", "1", "4"], (PURPLE, ORANGE), False),  # 0 lies between two steps
        (0, 6, ["0", "1", "6"], (PURPLE, ORANGE), False),
        (0, 1, ["0", "1"], (PURPLE, NONE), False),
    ],
)
def test_the_legend_of_lambda_has_the_colours_of_the_tokens(opened, lower, upper, labels, ends, middle_is_reversed):
    page = opened(token_view(lower, upper))
    parts = page.locator("#token-legend span").all()
    ramps = page.locator("#token-legend .ramp").evaluate_all("ramps => ramps.map(ramp => ramp.style.backgroundImage)")
    assert [part.inner_text() for part in parts[:-1:2]] == labels
    assert len(ramps) == len(labels) - 1
    assert ramps[0] == f"linear-gradient(to right, {PURPLE}, transparent)"
    assert ramps[1:] == [f"linear-gradient(to right, transparent, {ORANGE})"] * (len(labels) - 2)
    assert ("wavy" in parts[-1].inner_text()) == (lower < 0)
    first, middle, last = page.locator(".token").all()
    colours = [one.evaluate("token => getComputedStyle(token).backgroundColor") for one in (first, last)]
    assert tuple(colours) == ends
    assert ("negative" in middle.get_attribute("class")) == middle_is_reversed


def test_an_answer_says_how_it_ended_and_what_is_not_shown(opened):
    notes = [
        opened(token_view(-6, 3, cut=cut, finish_reason=ended)).locator(".answer .note").all_inner_texts()
        for cut, ended in ((1, "stop"), (700, "length"), (0, "stop"))
    ]
    assert notes == [
        ["1 further token is not shown"],
        ["ended by: length", "700 further tokens are not shown"],
        [],
    ]


def test_the_keyboard_reaches_every_token(opened):
    page = opened(whole_page())
    stream = page.locator(".stream").nth(1)
    stream.focus()
    for expected in (1, 2, 3):
        page.keyboard.press("ArrowRight")
        assert f"token {expected} of 5" in page.locator("#token-details").inner_text()
        assert stream.get_attribute("aria-activedescendant") == f"token-1-{expected - 1}"
    page.keyboard.press("End")
    assert "token 5 of 5" in page.locator("#token-details").inner_text()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert "token 1 of 5" in page.locator("#token-details").inner_text()
    assert page.locator('[role="option"][aria-selected="true"]').count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_colour_schemes(opened, scheme):
    page = opened(whole_page(), color_scheme=scheme)
    pairs = page.evaluate(
        """() => ['body', '.banner p', 'caption, .note', 'nav a', '.chart text', 'thead th'].map(where => {
            const element = document.querySelector(where);
            if (!element) return null;
            const style = getComputedStyle(element);
            return [where, style.fill !== 'rgb(0, 0, 0)' && element.tagName === 'text' ? style.fill : style.color,
                    getComputedStyle(document.body).backgroundColor];
        }).filter(Boolean)"""
    )
    assert len(pairs) >= 4
    for where, ink, paper in pairs:
        assert contrast(ink, paper) >= 4.5, where
    assert ("rgb(21, 21, 26)" in pairs[0][2]) == (scheme == "dark")


def test_a_phone_shows_it_without_sideways_scrolling(opened):
    page = opened(whole_page(), viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = page.locator("select").evaluate_all("boxes => boxes.map(box => box.getBoundingClientRect().right)")
    assert max(boxes) <= 360


def test_without_scripts_the_numbers_are_there(opened):
    page = opened(whole_page(), java_script_enabled=False)
    assert "40.0" in page.locator("#scores").inner_text()


def contrast(one, other):
    lights = []
    for colour in (one, other):
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_of_a_check_up_needs_no_sideways_scrolling(opened, tmp_path, width):
    write_page(examination(layers=24, prompts=9).to_json(), tmp_path / "doctor.html")
    text = (tmp_path / "doctor.html").read_text(encoding="utf-8")
    page = opened(text, viewport={"width": width, "height": 800})
    for summary in page.locator("details > summary").all():
        summary.click()
    assert page.locator("details[open]").count() == page.locator("details").count() > 9
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for picture in page.locator("svg.chart").all():
        box = picture.bounding_box()
        assert box["x"] + box["width"] <= width, "a figure is seen whole"
