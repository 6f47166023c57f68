"""A headless browser: Debian's chromium, driven by selenium."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
# Set by .ci/run: there the tests fail without a browser, instead of being skipped. 0 means no.
REQUIRED = os.environ.get("REQUIRE_BROWSER", "0") not in ("", "0")
MISSING = "needs Debian's chromium and chromium-driver: apt-get install chromium chromium-driver"


@contextmanager
def browser() -> Iterator[Chrome]:
    """Yields a browser that records its console."""
    assert CHROMIUM is not None, MISSING
    assert DRIVER is not None, MISSING
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # chromium refuses its sandbox as root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver: Chrome, *, width: int, height: int, dark: bool) -> None:
    """Emulate a window size and the theme of the system."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    scheme = "dark" if dark else "light"
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def screenshot(driver: Chrome, path: Path) -> None:
    """Save an image of the whole page."""
    answer = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    path.write_bytes(base64.b64decode(answer["data"]))
