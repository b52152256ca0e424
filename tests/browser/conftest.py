"""A real browser for pages: headless Chromium, as large as a desktop's window and as a phone.

`python -m pytest tests/browser` runs these tests; a plain `pytest` leaves them out. They need
selenium, and chromium with its driver: `apt-get install chromium chromium-driver`. Nothing is
downloaded, and a browser that is missing is a failure.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DEADLINE_S = 120.0

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
"""Width and height of what a page is seen through, in CSS pixels."""

OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # which needs rights that containers do not have
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out, unless the command line names it or something in it."""
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in named) else True


def open_browser(size: str) -> Any:
    """Start a Chromium of one of the sizes.

    Raises:
        AssertionError: If chromium or its driver is not installed.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    assert chromium, "These tests need a browser: apt-get install chromium"
    assert driver, "These tests need its driver: apt-get install chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, Service(driver))
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    # Windows have a least width of their own; this is what the page sees.
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    if size == "phone":
        browser.execute_cdp_cmd(
            "Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 5}
        )
    return browser


@pytest.fixture(scope="session", params=SIZES)
def _browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    browser = open_browser(request.param)
    browser.size_name = request.param
    yield browser
    browser.quit()


@pytest.fixture
def driver(_browser: Any) -> Iterator[Any]:
    """A browser of each size, a selenium driver; `driver.size_name` says which.

    No script of a page may raise. An address that does not answer is no such failure.
    """
    _browser.get_log("browser")  # those of the test before
    yield _browser
    log = _browser.get_log("browser")
    _browser.get("about:blank")
    _browser.delete_all_cookies()
    assert [each["message"] for each in log if each["source"] == "javascript"] == []


@pytest.fixture
def until(driver: Any) -> Callable[[Callable[[], Any]], Any]:
    """A function that waits until another one returns something true, and returns that.

    An element that the page has replaced meanwhile, or has not made yet, is looked for again.
    """
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.support.wait import WebDriverWait

    ignored = (NoSuchElementException, StaleElementReferenceException)
    waiting = WebDriverWait(driver, DEADLINE_S, 0.05, ignored_exceptions=ignored)
    return lambda condition: waiting.until(lambda _driver: condition())


def assert_fits(driver: Any) -> None:
    """Check that a page needs no scrolling to the side, and that its text can be read.

    Shapes:
        Whatever is wider than the window is named, with its width.
    """
    found = driver.execute_script(
        """
        const width = document.documentElement.clientWidth, wide = [];
        for (const each of document.body.querySelectorAll("*")) {
          const box = each.getBoundingClientRect();
          if (box.width && box.right > width + 1) wide.push(`${each.tagName} to ${box.right}`);
        }
        return {window: innerWidth, width, scrolls: document.documentElement.scrollWidth, wide};
        """
    )
    assert found["window"] == SIZES[driver.size_name][0], "the page says no viewport"
    assert found["scrolls"] <= found["width"], found["wide"]
