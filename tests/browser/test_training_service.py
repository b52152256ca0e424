"""The page of the training service, as people use it: submit, watch, cancel, wait."""

import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import assert_fits
from tests.examples.training_service import Service, serving

Until = Callable[[Callable[[], Any]], Any]

SHORT = {"epochs": 3, "points": 50, "replicas": 1}
LONG = {"epochs": 1000, "save_every": 10}


class Page:
    """What a person does and sees."""

    def __init__(self, driver: Any, until: Until) -> None:
        self.driver = driver
        self.until = until

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.until(lambda: self.find("#program option"))

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.find(selector).text)

    def cells(self, job: int) -> list[str]:
        """Return the texts of a job's row: number, program, status, step, loss."""
        found = self.find(f"#job-{job}").find_elements("css selector", "td")
        return [str(cell.get_property("textContent")) for cell in found[:5]]

    def step(self, job: int) -> int:
        return int(self.cells(job)[3].partition("/")[0] or 0)

    def submit(self, program: str, settings: dict[str, Any] | str) -> None:
        text = settings if isinstance(settings, str) else json.dumps(settings)
        self.find(f'#program option[value="{program}"]').click()
        self.find("#settings").clear()
        self.find("#settings").send_keys(text)
        self.find("#form button").click()

    def click(self, job: int, button: str) -> None:
        for each in self.driver.find_elements("css selector", f"#job-{job} button"):
            if each.text == button:
                each.click()


@pytest.fixture
def page(driver: Any, until: Until) -> Page:
    return Page(driver, until)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "data") as service:
        yield service


def test_a_job_is_submitted_followed_and_drawn(
    page: Page, service: Service, tmp_path: Path
) -> None:
    page.open(service.url)
    assert "spirals" in page.text("#program")
    assert page.text("#summary")
    assert_fits(page.driver)

    page.submit("spirals", SHORT)
    page.until(lambda: page.cells(1)[2] == "done")

    number, program, _, step, loss = page.cells(1)
    done, _, of = step.partition("/")
    assert (number, program, done) == ("1", "spirals", of)
    assert 0 < float(loss) < 5
    assert not page.find("#job-1 td:last-child button:last-child").is_enabled()
    page.click(1, "curve")
    page.until(lambda: page.find("#curve").get_property("naturalWidth") == 600)
    assert page.find("#curve").get_attribute("alt") == "Loss of job 1"
    assert_fits(page.driver)
    page.driver.save_screenshot(str(tmp_path / f"done-{page.driver.size_name}.png"))


def test_an_invalid_job_is_explained_and_a_long_one_is_cancelled(
    page: Page, service: Service, tmp_path: Path
) -> None:
    page.open(service.url)
    page.submit("digits", {"epochs": 0, "learning_rate": "fast"})
    page.until(lambda: "settings.epochs" in page.text("#problem"))
    assert "settings.learning_rate" in page.text("#problem")
    assert_fits(page.driver)
    page.driver.save_screenshot(str(tmp_path / f"rejected-{page.driver.size_name}.png"))
    page.submit("digits", "{not json")
    page.until(lambda: "settings.epochs" not in page.text("#problem"))
    assert page.text("#problem")
    assert page.driver.find_elements("css selector", "#jobs tr") == []

    page.submit("spirals", LONG)
    page.until(lambda: page.step(1) > 3)
    assert page.text("#problem") == ""
    seen = page.step(1)
    page.until(lambda: page.step(1) > seen)  # by itself
    page.click(1, "cancel")
    page.until(lambda: page.cells(1)[2] == "cancelled")


def test_a_page_goes_on_when_the_service_was_killed_and_started_again(
    page: Page, tmp_path: Path
) -> None:
    """The job is the same one, its steps go on behind those seen, and nothing is loaded anew."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with serving(tmp_path / "data", "--port", port) as service:
        page.open(service.url)
        page.driver.execute_script("window.isTheSamePage = true")
        page.submit("spirals", LONG)
        page.until(lambda: page.step(1) > 30)
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
        page.until(lambda: "does not answer" in page.text("#connection"))
        seen = page.step(1)
        page.driver.save_screenshot(str(tmp_path / f"away-{page.driver.size_name}.png"))
    with serving(tmp_path / "data", "--port", port):
        page.until(lambda: page.step(1) > seen)
        page.until(lambda: page.text("#connection") == "")
        assert page.driver.execute_script("return window.isTheSamePage")
        page.click(1, "cancel")
        page.until(lambda: page.cells(1)[2] == "cancelled")
