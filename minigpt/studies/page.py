"""What a person waits for in the explorer's page: until it is drawn, a token behind the text, a change inside it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt.checkpoint import checkpoint_path, save_checkpoint
from minigpt.errors import UserError
from minigpt.explorer.making import Wish, export, made
from minigpt.studies.decoding import LARGE, SMALL, DecodeCase, decode_config, untrained
from minigpt.studies.measure import Report, Spread, table
from minigpt.tokenizer import train_tokenizer

CHARACTERS = "".join(map(chr, range(32, 32 + 65)))
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
DRAWN = "() => window.app && app.trace && document.querySelector('#next table') && performance.now()"
SET = """async (texts) => {
  const waited = [];
  for (const text of texts) {
    await new Promise((done) => setTimeout(done, 200));
    const start = performance.now(), all = app.set({ text });
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    waited.push(performance.now() - start);
    await all;
  }
  return waited;
}"""
HOVER = """() => {
  const frame = document.querySelector(".map-frame"), box = frame.querySelector("canvas").getBoundingClientRect();
  return Array.from({ length: 50 }, (_, i) => {
    const place = { clientX: box.left + (i * box.width) / 60, clientY: box.top + box.height * 0.99, bubbles: true };
    const start = performance.now();
    frame.dispatchEvent(new PointerEvent("pointermove", place));
    frame.getBoundingClientRect();
    return performance.now() - start;
  });
}"""


@dataclass(frozen=True)
class Waited:
    """Milliseconds."""

    drawn: list[float]
    hovered: list[float]
    appended: list[float]  # until it is painted in the views that are in sight
    changed: list[float]
    megabytes: float


def page(*, repeats: int) -> Report:
    """Milliseconds in headless Chromium, for pages of untrained networks of two sizes.

    Raises:
        UserError: if playwright or Chromium is missing.
    """
    cases = {
        "0.8M, 64 tokens": (DecodeCase(SMALL, context_length=256, n_stream=1), 64),
        "10.6M, captured, 6 x 6 heads, 256 tokens": (DecodeCase(LARGE, context_length=256, n_stream=1), 256),
    }
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: waited(case, length, Path(scratch), repeats) for name, (case, length) in cases.items()}
    rows = [
        ["milliseconds, median (quartiles)", "drawn", "pointing at a cell", "a token more", "a change inside", "MB"]
    ]
    for name, times in found.items():
        cells = [times.drawn, times.hovered, times.appended, times.changed]
        rows.append([name, *(told(values) for values in cells), f"{times.megabytes:.1f}"])
    return Report(
        ["The explorer's page in headless Chromium; what is typed is painted in sight", *table(rows)],
        {"milliseconds": {name: vars(times) for name, times in found.items()}},
    )


def waited(case: DecodeCase, length: int, scratch: Path, repeats: int) -> Waited:
    """Write the page of such a network and use it."""
    tokenizer = train_tokenizer("char", [CHARACTERS])
    model, config = untrained(case, tokenizer.vocab_size), decode_config(case)
    tensors = {f"model.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    file, checkpoint = scratch / f"{case.size}.html", checkpoint_path(scratch / case.size, 0)
    checkpoint.parent.mkdir()
    save_checkpoint(checkpoint, tensors, {"step": 0, "config": config.model_dump(), "tokenizer": tokenizer.to_dict()})
    text = "".join(CHARACTERS[(i * i + 3 * i) % 65] for i in range(length))
    export(made(checkpoint, Wish(texts=[text])), "--export", file)
    drawn, hovered, appended, changed = [], [], [], []
    with chromium() as browser:
        for _ in range(repeats):
            opened = browser.new_page(viewport={"width": 1280, "height": 900})
            opened.goto(file.as_uri())
            drawn.append(opened.wait_for_function(DRAWN).json_value())
            hovered += opened.evaluate(HOVER)
            if opened.evaluate("() => app.engine.canType"):
                appended += opened.evaluate(SET, [text + CHARACTERS[1 : 2 + i] for i in range(8)])
                half = length // 2
                changes = [f"{text[:half]}{CHARACTERS[40 + i]}{text[half + 1 :]}" for i in range(8)]
                changed += opened.evaluate(SET, [text, *changes])[1:]
            opened.close()
    return Waited(drawn, hovered, appended, changed, file.stat().st_size / 1e6)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser.

    Raises:
        UserError: if it or playwright is missing.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise UserError("page: needs playwright: pip install playwright") from None
    if not path:
        raise UserError("page: needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


def told(values: list[float]) -> str:
    """``12.3 (11.9–13.0)``."""
    if not values:
        return ""
    spread = Spread.of(values)
    return f"{spread.median:.1f} ({spread.low:.1f}–{spread.high:.1f})"
