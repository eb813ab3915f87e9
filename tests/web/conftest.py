"""Chromium for the tests of this folder, and the front-end's fixtures. `make test-web` installs what they need."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest
from front_fixtures import setup
from playwright.async_api import Browser, async_playwright

__all__ = ["browser", "setup"]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
"""Containers have neither user namespaces nor much shared memory; the pages are our own."""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()
