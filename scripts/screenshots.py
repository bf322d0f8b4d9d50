"""`python scripts/screenshots.py PAGE... -o FOLDER`: what pages look like, to be looked at.

A page is a file, or an address of `erg serve`. Each in light and dark, 1280 and 400 pixels wide,
whole. Needs playwright and a chromium, by default the system's.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTHS = (1280, 400)


def main() -> int:
    """Take the pictures. Exits 1 if a page had something to complain about."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="+", metavar="PAGE")
    parser.add_argument(
        "--wait", default="html[data-drawn=true]", help="what is there when it is drawn"
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("screenshots"))
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=asked.chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for given in asked.pages:
            address, name = _found(given)
            for scheme in ("light", "dark"):
                for width in WIDTHS:
                    page = browser.new_page(
                        viewport={"width": width, "height": 900}, color_scheme=scheme
                    )
                    page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
                    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
                    page.goto(address)
                    page.wait_for_selector(asked.wait, timeout=30_000)
                    wide = page.evaluate("document.documentElement.scrollWidth")
                    if wide > width:
                        complaints.append(f"{name}: {wide} px wide in {width}")
                    file = asked.out / f"{name}-{width}-{scheme}.png"
                    page.screenshot(path=file, full_page=True)
                    page.close()
        browser.close()
    for line in dict.fromkeys(complaints):
        sys.stderr.write(f"{line}\n")
    return 1 if complaints else 0


def _found(page: str) -> tuple[str, str]:
    """Its address, and what to call its pictures."""
    if "://" not in page:
        return Path(page).resolve().as_uri(), Path(page).stem
    path = page.partition("://")[2].partition("/")[2].partition("?")[0]
    return page, re.sub(r"[^0-9a-z]+", "-", path) or "runs"


if __name__ == "__main__":
    sys.exit(main())
