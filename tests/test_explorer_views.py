"""The page's draws, worked examples and changed heads in a real browser: the same as Python's."""

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from running import Trained

from minigpt.assembly import load_model
from minigpt.checkpoint import find_checkpoint
from minigpt.explorer.making import Wish, made
from minigpt.explorer.page import Page
from minigpt.inspection.heads import Head
from minigpt.inspection.intervene import forced_by, sequence_losses
from minigpt.inspection.patterns import parse_reference
from minigpt.normal_form import from_checkpoint
from minigpt.plain import PlainEngine
from minigpt.sampling import SamplingOptions, generate
from minigpt.tokenizer import tokenizer_from_dict

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not there: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not there: apt-get install chromium"),
    pytest.mark.filterwarnings("default::ResourceWarning"),
]
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TEXT = "the ferry"


@pytest.fixture(scope="module")
def page(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page of the tiny run; what the console had to say fails the tests."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(Page(made(trained.path, Wish(texts=[TEXT])).payload).html(), encoding="utf-8")
    said: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        opened = browser.new_page()
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.goto(file.as_uri())
        opened.wait_for_function("window.app && app.trace")
        yield opened
        browser.close()
    assert said == []


def test_draws_write_what_generate_writes(page: Any, trained: Trained) -> None:
    checkpoint = find_checkpoint(trained.path)
    tokenizer, form = tokenizer_from_dict(checkpoint.tokenizer), from_checkpoint(checkpoint)
    options = SamplingOptions(temperature=1.1, top_k=20, top_p=0.95, min_p=0.01)
    prompt = tokenizer.encode(TEXT).tolist()
    expected = list(generate(PlainEngine(form), prompt, max_new_tokens=6, options=options, seed=5))
    law = {"temperature": 1.1, "topK": 20, "topP": 0.95, "minP": 0.01}
    state = {"tab": "look", "text": TEXT, "seed": 5, "drawn": 0, "held": 0, **law}
    page.evaluate("state => app.set(state)", state)
    for count in range(1, len(expected) + 1):
        page.click("#next button:text-is('draw')")
        assert page.inner_text("#next .said").startswith(f"Draw {count} of seed 5")
        page.click("#next button:text-is('append')")
        page.wait_for_function("length => app.trace.length === length", arg=len(prompt) + count)
    assert page.evaluate("() => Array.from(app.trace.ids)") == prompt + expected


def test_all_worked_examples_agree(page: Any) -> None:
    page.evaluate("() => app.set({ tab: 'worked' })")
    names = page.evaluate("() => [...document.querySelectorAll('#worked select option')].map((each) => each.value)")
    assert len(names) >= 24
    for name in names:
        page.evaluate("example => app.set({ example })", name)
        assert page.inner_text("#worked .said >> nth=0").startswith("Agrees with the published numbers"), name


def test_all_follows_a_changed_number(page: Any) -> None:
    page.evaluate("() => app.set({ tab: 'worked', example: 'three_token_causal', problem: '' })")
    page.fill("#worked input.cell >> nth=0", "-2.5")
    assert page.inner_text("#worked .said >> nth=0").startswith("Edited")
    assert page.evaluate("() => document.activeElement.value") == "-2.5"
    query = np.array([[-2.5, 0], [0, 1], [1, 1]])
    scores = query @ np.array([[1, 0], [0, 1], [1, 1.0]]).T
    raw = page.locator("#worked h3:text-is('1 raw scores') ~ div tbody tr:first-child span").all_inner_texts()
    assert raw == [f"{score:.4f}".replace("-", "−") for score in scores[0] + 0.0]
    page.click("#worked button:text-is('Reset')")
    assert page.inner_text("#worked .said >> nth=0").startswith("Agrees")


@pytest.mark.parametrize("reference", ["previous", "duplicate"])
def test_changed_heads_lose_what_they_lose_in_torch(page: Any, trained: Trained, reference: str) -> None:
    model = load_model(find_checkpoint(trained.path), "cpu")
    page.evaluate(
        "([text, changes]) => app.set({ tab: 'compare', compare: 'change', text, changes })",
        [TEXT, f"0.0={reference},0.1=off"],
    )
    page.wait_for_function("() => document.querySelector('#compare > .said').textContent.startsWith('Mean loss')")
    tokenizer = tokenizer_from_dict(find_checkpoint(trained.path).tokenizer)
    tokens = tokenizer.encode(TEXT).astype(np.int64)[None]
    attention = {Head(0, 0): forced_by(parse_reference(reference, tokenizer), tokens)}
    off = {Head(0, 1): lambda _, own: own.new_zeros(own.shape)}
    before = sequence_losses(model, tokens)[0]  # pyright: ignore[reportArgumentType]
    after = sequence_losses(model, tokens, attention=attention, results=off)[0]  # pyright: ignore[reportArgumentType]
    said = page.inner_text("#compare > .said")
    assert f"before {before:.4f}, after {after:.4f}" in said
