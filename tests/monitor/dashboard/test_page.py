"""The page in a real browser, with real peers of which one dies and one joins, and with thirty simulated peers.

Set SCREENSHOTS to a directory to save images of the page.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

from p2ptrain.monitor.dashboard.page_state import PageState
from p2ptrain.monitor.dashboard.server import showing
from p2ptrain.settings.peer_config import PageConfig
from tests.monitor.dashboard.browser import CHROMIUM, DRIVER, MISSING, REQUIRED, browser, look, screenshot
from tests.monitor.dashboard.madeup import MadeUpSwarm, ids, of_a_day
from tests.monitor.dashboard.test_server import stream
from tests.swarm.processes import Process, Swarm

pytestmark = pytest.mark.skipif(not REQUIRED and (CHROMIUM is None or DRIVER is None), reason=MISSING)

# Reached only if something hangs.
DEADLINE_S = 120.0
WIDE, PHONE = 1440, 390
LOOKS = [("wide", WIDE, False), ("wide", WIDE, True), ("phone", PHONE, False), ("phone", PHONE, True)]
PANELS = ("summary", "loss", "swarm", "correlation", "bytes", "rounds", "peers", "events")
SETTINGS = {"sync_every": 40, "eval_every": 20, "steps": 100_000, "batch_tokens": 64}


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    # These packages log every screenshot in full.
    for name in ("selenium", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with browser() as driver:
        yield driver


@pytest.fixture
def chrome(driver: Chrome) -> Chrome:
    """A browser with an empty page and an empty console."""
    driver.get("about:blank")
    driver.get_log("browser")
    return driver


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kinds(chrome: Chrome) -> list[str]:
    """The kinds of the peers, in the order of the table."""
    return chrome.execute_script(  # type: ignore[no-any-return]
        "return [...document.querySelectorAll('#peers tbody tr')].map((row) => row.dataset.kind)"
    )


def text(chrome: Chrome, selector: str) -> str:
    return chrome.find_element(By.CSS_SELECTOR, selector).text


def assert_looks_right(chrome: Chrome, name: str) -> None:
    """In both themes and widths: nothing is too wide or missing, and the console is empty."""
    for form, width, dark in LOOKS:
        look(chrome, width=width, height=900, dark=dark)
        until(lambda dark=dark: _brightness(chrome) < 60 if dark else _brightness(chrome) > 200)
        until(lambda width=width: chrome.execute_script("return document.documentElement.clientWidth") == width)
        assert chrome.execute_script("return document.documentElement.scrollWidth") <= width, form
        for panel in PANELS:
            box = chrome.find_element(By.CSS_SELECTOR, f"main > .{panel}")
            assert box.is_displayed(), panel
            assert box.size["width"] > 300, panel
        if directory := os.environ.get("SCREENSHOTS"):
            height = chrome.execute_script("return document.documentElement.scrollHeight")
            look(chrome, width=width, height=height, dark=dark)
            time.sleep(1)
            screenshot(chrome, Path(directory) / f"{name}-{form}-{'dark' if dark else 'light'}.png")
    assert_no_complaints(chrome)


def assert_no_complaints(chrome: Chrome) -> None:
    assert [entry for entry in chrome.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def _brightness(chrome: Chrome) -> float:
    colour = chrome.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    channels = [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(channels) / 3


@pytest.mark.long
def test_a_real_swarm_loses_a_peer_and_gains_one(chrome: Chrome, swarm: Swarm) -> None:
    first = swarm.start("p2ptrain join --dashboard 0", settings=SETTINGS)
    swarm.until_ready(first)

    def joins() -> Process:
        return swarm.start(f"p2ptrain join --initial-peers {first.addresses}", settings=SETTINGS)

    second, third = joins(), joins()
    page = swarm.start(f"p2ptrain dashboard --initial-peers {first.addresses} --port 0")
    url = swarm.until(lambda: page.output.partition(" is shown at ")[2].strip())

    look(chrome, width=WIDE, height=900, dark=False)
    chrome.get(url)
    swarm.until(lambda: kinds(chrome) == ["training"] * 3)
    swarm.until(lambda: "committed by" in text(chrome, "#events"))
    # A peer's own page shows the same, itself included.
    own = swarm.until(lambda: first.output.partition("the run is shown at ")[2].split())[0]
    all_training = {peer.peer_id: "training" for peer in (first, second, third)}

    def seen() -> dict[str, str]:
        return {peer["id"]: peer["kind"] for peer in stream(own, "overview")["overview"]["peers"]}

    # Two pages do not learn of a peer at the same moment.
    swarm.until(lambda: seen() == all_training)
    second.kill()
    swarm.until(lambda: kinds(chrome) == ["training", "training", "gone"])
    assert "connection lost" in text(chrome, "#events")
    fourth = joins()
    swarm.until(lambda: kinds(chrome) == ["training", "training", "training", "gone"])
    swarm.until(lambda: "joined late" in text(chrome, "#events"))
    all_peers = {row.get_attribute("data-peer") for row in chrome.find_elements(By.CSS_SELECTOR, "#peers tbody tr")}
    assert all_peers == {peer.peer_id for peer in (first, second, third, fourth)}
    # Observers are not members.
    assert all(set(event["alive"]) <= all_peers for event in first.events("peers"))
    if "SCREENSHOTS" in os.environ:
        time.sleep(45)
    assert_looks_right(chrome, "real")
    for panel in ("loss", "swarm", "rounds", "bytes"):
        assert not chrome.find_element(By.CSS_SELECTOR, f".{panel} .empty").is_displayed(), panel


@contextmanager
def made_up(count: int, seconds: int) -> Iterator[tuple[str, MadeUpSwarm]]:
    swarm = MadeUpSwarm()
    swarm.start(*ids(count), at_s=time.time() - seconds)
    swarm.live(seconds)
    with showing(PageState("novels", swarm), PageConfig(port=0)) as url:
        yield url, swarm


@pytest.mark.long
def test_thirty_peers_of_a_day(chrome: Chrome) -> None:
    swarm = of_a_day(30, time.time())
    with showing(PageState("novels", swarm), PageConfig(port=0)) as url:
        look(chrome, width=WIDE, height=900, dark=False)
        chrome.get(url)
        until(lambda: kinds(chrome) == ["training"] * 30)
        until(lambda: bool(chrome.find_elements(By.CSS_SELECTOR, "#loss-chart canvas")))
        assert "1,440\nso far, states equal" in text(chrome, "#tiles")
        swarm.kill(ids(30)[4])
        until(lambda: kinds(chrome).count("gone") == 1)
        assert len(chrome.find_elements(By.CSS_SELECTOR, "#graph .nodes > g")) == 30
        assert len(chrome.find_elements(By.CSS_SELECTOR, ".timeline tbody tr")) == 30
        assert_looks_right(chrome, "thirty")


def test_it_can_be_used_by_keyboard_and_read_out(chrome: Chrome) -> None:
    with made_up(4, 600) as (url, swarm):
        look(chrome, width=WIDE, height=900, dark=False)
        chrome.get(url)
        until(lambda: kinds(chrome) == ["training"] * 4)
        until(lambda: bool(chrome.find_elements(By.CSS_SELECTOR, "#loss-chart canvas")))
        assert text(chrome, "#ways") == "Rounds and state take direct connections."
        first, second, _, fourth = ids(4)
        swarm.relayed = {first: {second: ""}, fourth: {first: "QmRelay", second: "QmRelay"}}
        until(lambda: text(chrome, "#ways").count("relayed through") == 2)
        assert "peers 1 and 2: libp2p carries rounds and state" in text(chrome, "#ways")

        reached = []
        for _ in range(30):
            chrome.switch_to.active_element.send_keys(Keys.TAB)
            focus = chrome.switch_to.active_element
            reached.append(focus.get_attribute("id") or focus.text)
            assert focus.value_of_css_property("outline-style") == "solid", reached
            if reached[-1] == "events":
                break
        assert reached[:2] == ["Skip to the content", "theme"]
        assert {"training", "held-out", "10 min", "all", "peer 1", "rounds", "events"} <= set(reached)

        theme = chrome.find_element(By.ID, "theme")
        for chosen, dark in (("light", False), ("dark", True), ("auto", False)):
            theme.send_keys(Keys.ENTER)
            assert theme.get_attribute("aria-label") == f"Colour theme: {chosen}"
            assert (_brightness(chrome) < 60) is dark

        summary = chrome.find_element(By.CSS_SELECTOR, ".loss summary")
        summary.send_keys(Keys.ENTER)
        until(lambda: len(chrome.find_elements(By.CSS_SELECTOR, "#loss-table tbody tr")) == 4)
        for section in chrome.find_elements(By.CSS_SELECTOR, "main > section"):
            assert chrome.find_element(By.ID, section.get_attribute("aria-labelledby") or "").tag_name == "h2"
        swarm.kill(ids(4)[2])
        until(lambda: "peer 3 is gone" in (chrome.find_element(By.ID, "announcer").get_attribute("textContent") or ""))
        assert_no_complaints(chrome)


def test_hostile_text_stays_text(chrome: Chrome) -> None:
    with made_up(2, 100) as (url, swarm):
        bad = "<img src=x onerror=\"document.title='owned'\">"
        for peer in swarm.peers.values():
            peer.status = bad
        swarm.peers[ids(2)[0]].event_log.write(
            "fragments", step=1, sent=1, to={bad: 3, "__proto__": 1}, merged=0, skipped={bad: 1, "__proto__": 2},
            bytes_sent=1, bytes_received=1, staleness=0.0,
        )  # fmt: skip
        chrome.get(url)
        until(lambda: bad in text(chrome, "#peers"))
        assert not chrome.find_elements(By.CSS_SELECTOR, "main img")
        assert "owned" not in chrome.title
        assert_no_complaints(chrome)


def test_an_empty_page_and_a_lost_server_are_reported(chrome: Chrome) -> None:
    source = PageState("novels")
    source.trouble = "no peer answers; trying again every 2 s"
    with showing(source, PageConfig(port=0)) as url:
        chrome.get(url)
        until(lambda: "no peer answers" in text(chrome, "#trouble"))
        assert_looks_right(chrome, "empty")
        assert all(note.is_displayed() for note in chrome.find_elements(By.CSS_SELECTOR, ".empty"))
    until(lambda: "connection lost" in text(chrome, "#connection"))
