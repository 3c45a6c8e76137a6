"""The page in a real browser: what is on the screen is what the model computes, and nothing leaves the page."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import ROOT, Script, Trained

from minigpt import plain
from minigpt.checkpoint import find_checkpoint
from minigpt.explorer.capture import capture
from minigpt.explorer.page import LANGUAGES, strings
from minigpt.normal_form import NormalForm, from_checkpoint
from minigpt.tokenizer import Tokenizer, tokenizer_from_dict

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not there: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not there: apt-get install chromium"),
    pytest.mark.filterwarnings("default::ResourceWarning"),
]
EXPLORE = ROOT / "scripts" / "explore.py"
TEXT = "the ferry </script> naïve 🦆 rope"
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TOGGLED = "tokens", "heads", "head", "row", "stream", "next"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, script: Script, trained: Trained, tmp_path: Path) -> Iterator[Any]:
    """The page of the tiny run, opened from disk; what the console or the network had to say fails the test."""
    file = tmp_path / "page.html"
    assert script(EXPLORE, trained.path, "--export", file, "--text", "the ferry").code == 0
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_function("window.app && app.trace")
    yield page
    context.close()
    assert said == []
    assert {address.partition("#")[0] for address in asked if not address.startswith("blob:")} == {file.as_uri()}


@pytest.fixture
def model(trained: Trained) -> NormalForm:
    return from_checkpoint(find_checkpoint(trained.path)).astype(np.float64)


@pytest.fixture
def tokenizer(trained: Trained) -> Tokenizer:
    return tokenizer_from_dict(find_checkpoint(trained.path).tokenizer)


def typed(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.wait_for_function("text => app.state.text === text && !app.mistake.length || app.mistake", arg=text)


def in_page(page: Any, expression: str) -> Any:
    return page.evaluate(f"() => JSON.parse(JSON.stringify({expression}))")


def numbers_of(page: Any, selector: str) -> list[float]:
    """The numbers of the cells that match."""
    return [float(text.replace("−", "-")) for text in page.locator(selector).all_inner_texts()]


def test_numbers_on_the_screen_are_the_model_s(opened: Any, model: NormalForm, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the ferry")
    assert in_page(opened, "Array.from(app.trace.ids)") == ids.tolist()
    found, last = capture(model, ids), len(ids) - 1
    opened.evaluate("() => app.set({ layer: 0, head: 1, step: 4 })")
    scores = (found.query[0, 1, last] * found.key[0, model.key_head[1]]).sum(axis=1)
    columns = {3: scores, 4: scores / model.head_dim**0.5, 7: found.weights[0, 1, last]}
    for column, expected in columns.items():
        shown = numbers_of(opened, f"#row tbody td:nth-child({column})")
        np.testing.assert_allclose(shown, expected, atol=6e-5)
    opened.evaluate("() => app.set({ step: 6 })")
    output = found.weights[0, 1, last] @ found.value[0, model.key_head[1]]
    np.testing.assert_allclose(numbers_of(opened, "#row .tall:nth-child(2) td:nth-child(2)"), output, atol=6e-6)
    deviations = re.findall(r"[\d.]+e[+-]\d+", opened.inner_text("#row p:last-child"))
    assert len(deviations) == 2 and all(float(number) < 1e-5 for number in deviations)
    shares = plain.softmax(found.logits[last] / 0.8)
    shown = opened.locator("#next tbody tr").first.inner_text()
    assert f"{100 * shares.max():.2f} %" in shown


def test_everything_follows_what_is_typed(opened: Any, model: NormalForm, tokenizer: Tokenizer) -> None:
    for text in ("a", "the ferry rope", "the fairy rope", "the f"):
        typed(opened, text)
        ids = tokenizer.encode(text)
        opened.wait_for_function("n => app.trace.length === n", arg=len(ids))
        logits = np.array(in_page(opened, f"Array.from(app.trace.logits({len(ids) - 1}))"))
        expected = plain.forward(model, ids)[-1]
        assert abs(logits - expected).max() <= 1e-4 * abs(expected).max()
        assert opened.locator("#tokens .token").count() == len(ids)


def test_hostile_text_is_text(opened: Any) -> None:
    """A tag that would end the script, a letter and an emoji that the run never saw."""
    opened.fill("#text", TEXT)
    opened.wait_for_timeout(200)
    assert opened.locator("script").count() == in_page(opened, "document.scripts.length")
    assert opened.locator("#tokens .mistake").inner_text() or opened.locator("#tokens .token").count() > 10


def test_all_can_be_reached_by_keyboard(opened: Any) -> None:
    opened.keyboard.press("Escape")
    before = in_page(opened, "app.state")
    for key, name in (("]", "head"), ("4", "step"), (",", "row")):
        opened.keyboard.press(key)
        assert in_page(opened, "app.state")[name] != before[name], key
    opened.keyboard.press("?")
    assert opened.locator("dialog[open]").count() == 1
    opened.keyboard.press("Escape")
    reached: set[str] = set()
    for _ in range(150):
        opened.keyboard.press("Tab")
        reached |= set(
            opened.evaluate("() => { const s = document.activeElement.closest('section'); return s ? [s.id] : [] }")
        )
    assert set(TOGGLED) <= reached


def test_arrows_turn_to_the_next_tab(opened: Any) -> None:
    opened.evaluate("() => app.set({ tab: 'look' })")
    names = [
        name.removeprefix("tab-") for name in opened.eval_on_selector_all("[role=tab]", "all => all.map(t => t.id)")
    ]
    opened.locator("#tab-look").focus()
    for key, at in (
        ("ArrowRight", 1),
        ("ArrowLeft", 0),
        ("ArrowLeft", -1),
        ("ArrowRight", 0),
        ("End", -1),
        ("Home", 0),
    ):
        opened.keyboard.press(key)
        opened.wait_for_function("name => app.state.tab === name", arg=names[at])
        opened.wait_for_function("name => document.activeElement.id === `tab-${name}`", arg=names[at])
    assert opened.locator("[role=tab][tabindex='0']").count() == 1 < len(names)


def test_the_address_brings_the_view_back(opened: Any) -> None:
    opened.evaluate("() => app.set({ layer: 0, head: 1, row: 3, step: 5, hide: '1' })")
    opened.wait_for_timeout(250)
    state = in_page(opened, "app.state")
    opened.reload()
    opened.wait_for_function("window.app && app.trace")
    again = in_page(opened, "app.state")
    assert {key: str(again[key]) for key in state} == {key: str(value) for key, value in state.items()}


@pytest.mark.parametrize("tab", ["look", "worked", "compare", "film"])
def test_each_tab_fits_a_phone_and_a_wide_screen_in_both_languages(opened: Any, tab: str) -> None:
    for width in (360, 1600):
        opened.set_viewport_size({"width": width, "height": 800})
        for language in LANGUAGES:
            opened.evaluate("([tab, lang]) => app.set({ tab, lang })", [tab, language])
            opened.wait_for_timeout(100)
            assert opened.evaluate("() => document.documentElement.scrollWidth") <= width
            text = opened.inner_text("body")
            assert not re.search(r"\bundefined\b|\bNaN\b|\[object|\{\w+\}", text)
            missing = [
                key for key in strings("en") if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", text) and "." in key
            ]
            assert not missing


def test_closed_tables_open(opened: Any) -> None:
    for tab in ("look", "compare", "film"):
        opened.evaluate("tab => app.set({ tab })", tab)
        opened.wait_for_timeout(100)
        opened.evaluate("() => document.querySelectorAll('main details').forEach((each) => (each.open = true))")
        opened.wait_for_timeout(100)
        assert opened.evaluate(
            "() => [...document.querySelectorAll('main details')].every((each) => each.querySelector('table'))"
        )


def test_both_languages_say_the_same_things() -> None:
    """But for what the examples and mistakes are called, which they say in English themselves."""
    tables = [strings(language) for language in LANGUAGES]
    tables[1] = {key: sentence for key, sentence in tables[1].items() if not key.startswith(("about.", "wrong."))}
    assert set(tables[0]) == set(tables[1])
    for key, sentence in tables[0].items():
        names = [sorted(set(re.findall(r"\{(\w+)\}", table[key]))) for table in tables]
        assert names[0] == names[1], key
        assert sentence.strip() and tables[1][key].strip(), key


def test_the_worked_examples_need_no_model(browser: Any, tmp_path: Path) -> None:
    from minigpt.explorer.page import Page
    from minigpt.explorer.payload import examples

    file = tmp_path / "worked.html"
    payload = {
        "format": 1,
        "lang": "en",
        "title": "minigpt",
        "view": "worked",
        "text": "",
        "models": [],
        "captured": [],
    }
    payload |= {"tokenizer": None, "server": None, "nulls": None, "film": None, "run": None, "examples": examples()}
    file.write_text(Page(payload).html(), encoding="utf-8")
    page, said = browser.new_page(), []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("#worked table")
    assert said == [] and "0.4011" in page.inner_text("#worked")
    page.close()


def test_the_numbers_of_a_tab_are_json(opened: Any) -> None:
    assert json.loads(opened.evaluate("() => document.getElementById('payload').textContent"))["format"] == 1


def test_an_address_of_nonsense_does_no_harm(opened: Any) -> None:
    address = opened.url.partition("#")[0]
    for nonsense in (
        "lang=ja_JP",
        "lang=__proto__",
        "held=1&drawn=9999999999&seed=" + 30 * "9",
        "row=1e9&layer=-4&step=x",
    ):
        opened.goto(f"{address}#{nonsense}")
        opened.reload()
        opened.wait_for_function("window.app && app.trace")
        assert opened.locator("#next tbody tr").count() > 5


def test_numbers_of_a_text_that_can_not_be_read_are_told_to_be_the_last_one_s(opened: Any) -> None:
    opened.fill("#text", "")
    opened.wait_for_selector("body.stale")
    assert strings("en")["stale"] in opened.inner_text("#tokens .mistake")
    opened.fill("#text", "the")
    opened.wait_for_selector("body:not(.stale)")
    assert opened.inner_text("#tokens .mistake") == ""


def test_a_head_that_is_off_is_shown_as_off(opened: Any) -> None:
    opened.evaluate("() => app.set({ tab: 'compare', compare: 'change', changes: '0.0=off' })")
    opened.wait_for_function("document.querySelectorAll('#compare canvas.map').length === 3")
    opened.evaluate("() => document.querySelectorAll('#compare details').forEach((each) => (each.open = true))")
    opened.wait_for_timeout(100)
    tables = opened.locator("#compare figure table").all() or opened.locator("#compare table").all()
    sums = [
        sum(map(abs, (float(x.replace("−", "-")) for x in re.findall(r"[−-]?\d\.\d+", each.inner_text()))))
        for each in tables
    ]
    assert any(total == 0 for total in sums), sums
