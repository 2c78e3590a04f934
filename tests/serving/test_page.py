"""The page at `/`: it loads nothing from elsewhere, and inserts texts as text (in a real browser)."""

from __future__ import annotations

import re
import shutil

import pytest

from diffscore_fast.serving.settings import Settings
from tests.support.service import get, served

TOKEN = "a-token-of-a-test-1234"


def test_the_page_has_no_parts_that_its_policy_forbids(mini):
    page = get(mini, "/")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?:|<style|\sstyle=|\son\w+=|<script(?! src=)", page.text)
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert get(mini, f"/{name}").status_code == 200
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in get(mini, "/page.js").text
    assert get(mini, "/", Settings(token=TOKEN)).status_code == 401


@pytest.mark.extras
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_scores_and_compares_by_keyboard(scheme):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium")
    with served() as (_, address), playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme)
        wrong: list[str] = []
        hosts: set[str] = set()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(address)
        page.fill("#candidates", "Two people were found dead.\n<img src=x onerror=alert(1)> \U0001f600 text")
        page.focus("#candidates")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#score-result:not([hidden])")
        rows = page.locator("#rows td.text").all_inner_texts()
        assert rows == ["Two people were found dead.", "<img src=x onerror=alert(1)> \U0001f600 text"]
        assert page.locator("img").count() == 0
        assert page.locator("#profile polyline").count() == 2
        for name in ("sources", "a", "b"):
            page.fill(f"#{name}", "The cat sat.\n\nIt rained.")
        page.focus("#compare-form button")
        page.keyboard.press("Enter")
        page.wait_for_selector("#compare-result:not([hidden])")
        assert "equal in 2" in page.inner_text("#compare-result")
        assert "Left out" in page.inner_text("#compare-result")
        browser.close()
    assert not wrong
    assert hosts == {address.removeprefix("http://")}
