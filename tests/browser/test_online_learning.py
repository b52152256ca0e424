"""The page of the service that learns online, with the real service and the replaying client."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from .conftest import assert_fits

ROOT = Path(__file__).resolve().parents[2]
Until = Callable[[Callable[[], Any]], Any]


@contextmanager
def serving(data: Path, port: int = 0, *options: str) -> Iterator[str]:
    """Run the service with its client; gives its address."""
    command = [sys.executable, "-m", "examples.online_learning", "--port", str(port)]
    command += ["--no-background"]  # other tests may keep every core busy
    with subprocess.Popen(
        [*command, "--data", str(data), *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line
            yield line.partition(" at ")[2].partition(",")[0]
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def text(driver: Any, name: str) -> str:
    return str(driver.find_element(By.ID, name).text)


def keep(driver: Any, folder: Path, name: str) -> None:
    """Write the whole page as a picture, to look at."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    width = driver.execute_script("return document.documentElement.clientWidth")
    size = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    options = {"clip": size, "captureBeyondViewport": True}
    found = driver.execute_cdp_cmd("Page.captureScreenshot", options)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{driver.size_name}-{name}.png").write_bytes(base64.b64decode(found["data"]))


def assert_heads_whole(driver: Any) -> None:
    """Check that no word in the head of a table is broken over lines."""
    broken = driver.execute_script(
        """
        const words = [];
        for (const head of document.querySelectorAll("th")) {
          const text = head.firstChild;
          if (!text || text.nodeType !== Node.TEXT_NODE || !head.offsetParent) continue;
          for (const {0: word, index} of text.data.matchAll(/\\S+/g)) {
            const range = document.createRange();
            range.setStart(text, index);
            range.setEnd(text, index + word.length);
            words.push([word, range.getClientRects().length]);
          }
        }
        return words;
        """
    )
    assert {word for word, _ in broken} >= {"Version", "Gate", "Example"}
    assert [word for word, lines in broken if lines != 1] == []


@pytest.fixture
def pictures(pytestconfig: pytest.Config) -> Path:
    return Path(pytestconfig.rootpath) / ".pytest_cache" / "pictures"


def test_the_page_shows_what_is_learned_and_comes_back_after_a_restart(
    driver: Any, until: Until, tmp_path: Path, pictures: Path
) -> None:
    with serving(tmp_path, 0, "--rate", "100") as url:
        driver.get(url)
        until(lambda: text(driver, "status") == "live")
        until(lambda: text(driver, "river").endswith("%") and int(text(driver, "learned")) > 150)
        until(lambda: "let through" in text(driver, "versions"))
        assert "serving version" in text(driver, "serving")
        assert not driver.find_element(By.ID, "operating").is_displayed()
        until(lambda: float(text(driver, "accuracy").rstrip(" %")) > 50)
        assert_fits(driver)
        keep(driver, pictures, "live")
        learned = int(text(driver, "learned"))
    until(lambda: "not connected" in text(driver, "status"))
    assert "figures of" in text(driver, "status")
    assert driver.find_element(By.CSS_SELECTOR, "#figures.stale")
    with serving(tmp_path, int(url.rpartition(":")[2]), "--rate", "100"):
        until(lambda: text(driver, "status") == "live")
        until(lambda: not driver.find_elements(By.CSS_SELECTOR, ".stale"))
        assert int(text(driver, "learned")) >= learned
        until(lambda: "River's model began at nothing" in text(driver, "anew"))
        assert_fits(driver)
        keep(driver, pictures, "again")


def test_a_wrong_token_is_told_and_a_right_one_is_used_at_once(
    driver: Any, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLINE_LEARNING_TOKEN", "secret")
    with serving(tmp_path, 0, "--no-replay") as url:
        driver.get(url)
        until(lambda: text(driver, "status") == "a token is needed")
        assert text(driver, "refused") == ""
        driver.find_element(By.ID, "token").send_keys("Secret", Keys.ENTER)
        until(lambda: text(driver, "refused") == "The service does not take this token.")
        assert_fits(driver)
        driver.find_element(By.ID, "token").clear()
        driver.find_element(By.ID, "token").send_keys("secret", Keys.ENTER)
        until(lambda: text(driver, "status") == "live")
        assert not driver.find_element(By.ID, "access").is_displayed()


def test_the_form_predicts_and_takes_a_correction_by_keyboard_alone(
    driver: Any, until: Until, tmp_path: Path, pictures: Path
) -> None:
    with serving(tmp_path, 0, "--no-replay") as url:
        driver.get(url)
        until(lambda: text(driver, "status") == "live")
        driver.switch_to.active_element.send_keys(Keys.TAB)
        table = driver.switch_to.active_element
        assert table.get_attribute("aria-label") == "Versions"  # can be scrolled by keys, too
        table.send_keys(Keys.TAB)
        chosen = driver.switch_to.active_element
        assert chosen.tag_name == "select"
        chosen.send_keys("1")
        for _ in range(9):
            driver.switch_to.active_element.send_keys(Keys.TAB)
        assert driver.switch_to.active_element.text == "Predict"
        driver.switch_to.active_element.send_keys(Keys.ENTER)
        until(lambda: "version 0" in text(driver, "prediction"))
        driver.switch_to.active_element.send_keys(Keys.TAB)
        assert driver.switch_to.active_element.text == "Phishing"
        driver.switch_to.active_element.send_keys(Keys.ENTER)
        until(lambda: "example 1" in text(driver, "prediction"))
        until(lambda: text(driver, "learned") == "1")
        assert_fits(driver)
        keep(driver, pictures, "form")


def test_operators_pin_roll_back_and_retry(
    driver: Any, until: Until, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLINE_LEARNING_OPERATOR_TOKEN", "operators")

    def press(name: str) -> None:
        button = driver.find_element(By.CSS_SELECTOR, f"[data-do={name}]")
        driver.execute_script("arguments[0].click()", button)

    with serving(tmp_path, 0, "--no-replay") as url:
        driver.get(url)
        until(lambda: text(driver, "status") == "live")
        press("pause")
        until(lambda: "A bearer token is needed" in text(driver, "done"))
        assert not driver.find_element(By.ID, "access").is_displayed()
        driver.find_element(By.ID, "operator").send_keys("operators")
        press("pause")
        until(lambda: "the learner is paused" in text(driver, "done"))
        press("resume")
        until(lambda: "the learner is running" in text(driver, "done"))
        press("pin")
        until(lambda: "pinned" in text(driver, "serving"))
        for _ in range(2):
            driver.execute_script("ask('learn', {input: Array(9).fill(1), target: 1})")
        until(lambda: text(driver, "learned") == "2")
        assert text(driver, "version") == "0"
        driver.find_element(By.ID, "to").send_keys("0")
        driver.find_element(By.ID, "skip").send_keys("2", Keys.ENTER)
        until(lambda: "rollback: done" in text(driver, "done"))
        until(lambda: "rollbacks so far: 1" in text(driver, "serving"))
        # The one that was skipped is a dead letter now.
        driver.execute_script("showLetters(1)")
        until(lambda: driver.find_elements(By.CSS_SELECTOR, "#letters button"))
        assert_fits(driver)
        assert_heads_whole(driver)
        keep(driver, pictures, "operating")
        for scheme, color in {"dark": "rgb(18, 23, 30)", "light": "rgb(244, 246, 249)"}.items():
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            shown = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert shown == color
            keep(driver, pictures, f"operating-{scheme}")
        driver.execute_script("document.querySelector('#letters button').click()")
        until(lambda: "retry: done" in text(driver, "done"))
        until(lambda: text(driver, "learned") == "3")


def test_models_stand_side_by_side_and_one_is_promoted(
    driver: Any, until: Until, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLINE_LEARNING_OPERATOR_TOKEN", "operators")
    with serving(tmp_path, 0, "--no-replay", "--challenger") as url:
        driver.get(url)
        until(lambda: text(driver, "status") == "live")
        for _ in range(3):
            driver.execute_script("ask('learn', {input: Array(9).fill(1), target: 1})")
        until(lambda: "slower running 3 0 accuracy" in text(driver, "models"))
        assert "main served 3 0 accuracy" in text(driver, "models")
        button = driver.find_element(By.CSS_SELECTOR, "[data-model=slower] button")
        driver.find_element(By.ID, "operator").send_keys("operators")
        driver.execute_script("arguments[0].focus()", button)
        driver.execute_script("ask('learn', {input: Array(9).fill(0), target: 0})")
        until(lambda: "slower running 4" in text(driver, "models"))
        driver.switch_to.active_element.send_keys(Keys.ENTER)  # it has kept the focus
        until(lambda: "promote: done" in text(driver, "promoted"))
        until(lambda: "slower served" in text(driver, "models"))
        assert driver.find_element(By.CSS_SELECTOR, "[data-model=main] button").text == "Promote"
        assert_fits(driver)
        for scheme in ("dark", "light"):
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            keep(driver, pictures, f"models-{scheme}")
    with serving(tmp_path, int(url.rpartition(":")[2]), "--no-replay", "--challenger"):
        until(lambda: text(driver, "status") == "live")
        until(lambda: "slower served" in text(driver, "models"))
    with serving(tmp_path / "alone", 0, "--no-replay") as url:
        driver.get(url)
        until(lambda: text(driver, "status") == "live")
        assert not driver.find_element(By.ID, "challengers").is_displayed()


def test_text_of_the_service_is_never_shown_as_markup(
    driver: Any, until: Until, tmp_path: Path
) -> None:
    letter = '{number: 7, error: "<img src=x onerror=document.title=1>", example: {}}'
    with serving(tmp_path, 0, "--no-replay") as url:
        driver.get(url)
        until(lambda: text(driver, "status") == "live")
        driver.execute_script(f"ask = async () => ({{dead_letters: [{letter}]}}); showLetters(1);")
        until(lambda: "<img src=x" in text(driver, "letters"))
        assert driver.find_elements(By.CSS_SELECTOR, "#letters img") == []
        assert driver.title == "Online learning"
