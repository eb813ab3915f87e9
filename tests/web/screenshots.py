"""Makes docs/console-desktop.png and docs/console-phone.png: `make screenshots`, two minutes."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from conftest import ARGUMENTS, CHROMIUM
from playwright.async_api import async_playwright
from stage import stage

SECONDS = 95.0
"""Until the last minute's figures are whole."""
MOST_PIXELS = 1600
"""Of a page's height: a phone's is longer than anybody reads in a picture."""
VIEWS: dict[str, Any] = {
    "desktop": {"viewport": {"width": 1440, "height": 1100}, "color_scheme": "light", "device_scale_factor": 1.5},
    "phone": {
        "viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "device_scale_factor": 2, "is_mobile": True,
    },
}  # fmt: skip


async def main(folder: Path, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="syshax-stage") as scratch:
        async with stage(Path(scratch)) as front, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            pages = {}
            for name, view in VIEWS.items():
                pages[name] = await (await browser.new_context(**view)).new_page()
                await pages[name].goto(f"{front.url}/console")
            await asyncio.sleep(seconds)
            for name, page in pages.items():
                file = folder / f"console-{name}.png"
                high = min(await page.evaluate("document.documentElement.scrollHeight"), MOST_PIXELS)
                clip = {"x": 0, "y": 0, "width": VIEWS[name]["viewport"]["width"], "height": high}
                await page.screenshot(path=file, full_page=True, clip=clip)
                print(file)
            await browser.close()


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs")
    asyncio.run(main(where, float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS))
