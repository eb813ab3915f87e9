"""/console in Chromium: what it shows, that it follows, its keys, hostile names, small screens, the dark."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fake_daemon import FakeDaemon, session
from front_fixtures import Front, Setup, running_front, streaming, write_keys
from playwright.async_api import Browser, Page, expect

from syshax.protocol import ModelInfo, ModelState

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>&quot;\u202e"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "device_scale_factor": 2}


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path / "view.sock")
    await daemon.start()
    yield daemon
    await daemon.stop()


@asynccontextmanager
async def console(browser: Browser, url: str, **view: Any) -> AsyncIterator[Page]:
    """The page; whatever it complains of, or asks of another server, fails the test."""
    context = await browser.new_context(**view)
    page = await context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith(url) else None)
    await page.goto(f"{url}/console")
    try:
        yield page
    finally:
        await context.close()
    # Chromium itself reports answers that are no 2xx, and connections that fail.
    assert not [fault for fault in faults if not fault.startswith("Failed to load resource")]


async def front_of(setup: Setup, daemon: FakeDaemon, *models: str, **settings: Any) -> Front:
    worker = await setup.worker(*models)
    worker.answer = streaming(*[EVENT] * 30, b"data: [DONE]\n\n", pause=0.01)
    daemon.sessions = [session(worker.url)]
    return await setup.front(worker, daemon={"view_socket": str(daemon.path)}, **settings)


async def ask(front: Front, model: str = "m") -> None:
    async with await front.chat(model, stream=True) as response:
        await response.read()


async def test_it_shows_everything_and_follows(setup: Setup, daemon: FakeDaemon, browser: Browser) -> None:
    front = await front_of(setup, daemon)
    async with console(browser, front.url) as page:
        await expect(page.locator("#link")).to_contain_text("live")
        await expect(page.locator("#front")).to_contain_text("serving")
        await expect(page.locator("#models tbody tr")).to_contain_text(["1 of 1 ready"])
        await expect(page.locator("#workers tbody tr")).to_contain_text(["attached"])
        await expect(page.locator("#daemon")).to_contain_text("syshaxd ready")
        await expect(page.locator("#nodes")).to_contain_text("25 %")
        await expect(page.locator("#sessions tbody tr")).to_have_count(1)
        await expect(page.locator("#heat canvas").first).to_have_js_property("width", 4)
        figure = page.locator("#tiles .tile .figure").first
        await expect(figure).to_have_text("0tok/s")
        await ask(front)
        await expect(figure).not_to_have_text("0tok/s")
        await expect(page.locator("#tiles .tile").nth(2)).to_contain_text(re.compile(r"\d ms"))
        assert re.fullmatch(r"[\d.,]+ tok/s · syshax", await page.title())


async def test_states_are_words_and_marks_not_colours_alone(setup: Setup, daemon: FakeDaemon, browser: Browser) -> None:
    front = await front_of(setup, daemon)
    async with console(browser, front.url) as page:
        await expect(page.locator("#workers .state").first).to_have_text("✓ready")
        daemon.sessions = []
        await expect(page.locator("#workers .state").first).to_contain_text("✕not ready: its experts are not attached")
        await expect(page.locator("#workers .state").nth(1)).to_have_text("✕missing")
        await expect(page.locator("#front")).to_contain_text("no worker is ready")
        await daemon.stop()
        await expect(page.locator("#daemon")).to_contain_text("syshaxd not seen: no such file or directory")
        unnamed = "[role=img]:not([aria-label]), canvas:not([aria-label]):not([aria-hidden]), th:not([scope])"
        assert await page.locator(unnamed).count() == 0


async def test_a_key_is_asked_for_kept_and_forgotten(
    setup: Setup, daemon: FakeDaemon, browser: Browser, tmp_path: Path
) -> None:
    front = await front_of(
        setup, daemon, keys=write_keys(tmp_path / "keys.toml", {"sk-right": {}, "sk-some": {"models": ["m"]}})
    )
    async with console(browser, front.url) as page:
        await expect(page.locator("#key")).to_be_focused()
        assert await page.locator("#board").is_hidden() and await page.locator("tbody tr").count() == 0
        await page.fill("#key", "sk-wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#asked")).to_contain_text("not accepted")
        await page.fill("#key", "sk-some")
        await page.keyboard.press("Enter")
        await expect(page.locator("#asked")).to_contain_text("for some models only")
        await page.fill("#key", "sk-right")
        await page.keyboard.press("Enter")
        await expect(page.locator("#models tbody tr")).to_have_count(1)
        assert await page.locator("#ask").is_hidden() and "sk-right" not in await page.content()
        await page.reload()
        await expect(page.locator("#models tbody tr")).to_have_count(1)
        assert "sk-right" not in page.url
        await page.click("#forget")
        await expect(page.locator("#key")).to_be_visible()


async def test_hostile_names_are_text(setup: Setup, daemon: FakeDaemon, browser: Browser) -> None:
    front = await front_of(setup, daemon, HOSTILE)
    daemon.sessions = [session(front.app.workers.all[0].url, model=HOSTILE)]
    daemon.models = [ModelInfo(name="m", path="/m", format="q4_0", state=ModelState.READY)]
    async with console(browser, front.url) as page:
        await expect(page.locator("#models td.name")).to_contain_text(HOSTILE)
        await expect(page.locator("#sessions td.name")).to_contain_text(HOSTILE)
        await ask(front, HOSTILE)
        await asyncio.sleep(1.2)
        assert await page.evaluate("window.hit") is None
        assert await page.locator("main img, main script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_shows_all_of_it_without_sideways_scrolling(
    setup: Setup, daemon: FakeDaemon, browser: Browser, scheme: str
) -> None:
    front = await front_of(setup, daemon, "a-model-with-a-name-" + "that-goes-on-" * 6)
    async with console(browser, front.url, **PHONE, color_scheme=scheme) as page:
        await expect(page.locator("#sessions tbody tr")).to_have_count(1)
        await ask(front, next(iter(front.app.workers.all[0].models)))
        await expect(page.locator("#link")).to_contain_text("live")
        wide = await page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1] == 360
        outside = await page.evaluate(
            "[...document.querySelectorAll('main *')].filter((node) => { const area = node.getBoundingClientRect();"
            " return area.width && (area.right > innerWidth + 1 || area.left < -1) && !node.closest('thead'); }).length"
        )
        assert outside == 0


PAIRS = r"""() => {
  const luminance = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map(Number).map((v) => v / 255)
      .map((v) => (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const written = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  return [...document.querySelectorAll("body *")].filter((node) => written(node) && node.offsetParent)
    .map((node) => [node.textContent, luminance(getComputedStyle(node).color), luminance(ground(node))]);
}"""
"""Every visible text with the luminance of its colour and of what is behind it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read(setup: Setup, daemon: FakeDaemon, browser: Browser, scheme: str) -> None:
    front = await front_of(setup, daemon)
    async with console(browser, front.url, color_scheme=scheme) as page:
        await expect(page.locator("#sessions tbody tr")).to_have_count(1)
        texts = await page.evaluate(PAIRS)
        assert len(texts) > 40
        for text, ink, ground in texts:
            assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, text
        assert (texts[0][2] < 0.1) == (scheme == "dark")


async def test_the_heat_map_is_read_with_the_keyboard_too(setup: Setup, daemon: FakeDaemon, browser: Browser) -> None:
    daemon.tokens = [[14, 10, 10, 10], [11, 11, 11, 11], [0, 0, 12, 12]]
    front = await front_of(setup, daemon)
    async with console(browser, front.url) as page:
        await expect(page.locator("#heat .line")).to_contain_text("most asked for: layer 5, expert 2 (2.0 ")
        await expect(page.locator("#heat .line")).to_contain_text("not asked for: 2 of 12")
        await page.locator("#heat canvas").first.focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
            await page.keyboard.press(key)
        await expect(page.locator("#heat output")).to_contain_text("layer 5, expert 2: 2.0 ")


async def test_a_restarted_front_end_is_found_and_old_data_is_called_old(setup: Setup, browser: Browser) -> None:
    worker = await setup.worker()
    async with running_front(worker.url) as front:
        port = urlsplit(front.url).port
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(f"{front.url}/console")
        await expect(page.locator("#link")).to_contain_text("live")
    await expect(page.locator("#link")).to_contain_text(
        re.compile(r"data is \d+ s old: .*, trying again"), timeout=10000
    )
    assert await page.locator("body.old").count() == 1
    async with running_front(worker.url, port=port):
        await expect(page.locator("#link")).to_contain_text("live", timeout=10000)
        assert await page.locator("body.old").count() == 0
        await context.close()
