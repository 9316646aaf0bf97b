"""The report page in a real Chromium: it opens from a file, filters, zooms and shows a chosen backup."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cphicache.replay import write_page
from tests.replay.logs import events_of, find, step, write

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
ScrollOrigin = pytest.importorskip("selenium.webdriver.common.actions.wheel_input").ScrollOrigin
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver on PATH: apt-get install chromium chromium-driver",
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--window-size=1400,1600",
)  # fmt: skip
PATIENCE_S = 60
EVENTS = 100_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with a profile of its own, that keeps its console's messages."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_script_timeout(PATIENCE_S)
    yield driver
    driver.quit()


class Page:
    """The page of some logs, opened from its file."""

    def __init__(self, browser: Any, logs: list[Path], out: Path) -> None:
        self.browser = browser
        self.report = write_page(logs, out)
        browser.get_log("browser")
        browser.get(out.as_uri())
        self.drawn()

    def drawn(self) -> None:
        """Wait until what was asked for is drawn."""
        self.browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        )

    def find(self, selector: str) -> Any:
        """One element."""
        return self.browser.find_element("css selector", selector)

    def text(self, name: str) -> str:
        """The text of an element with this id."""
        text: str = self.browser.execute_script("return document.getElementById(arguments[0]).textContent;", name)
        return text

    def choose(self, name: str, value: str) -> None:
        """Choose an option by its text."""
        self.find(f"#{name}").find_element("xpath", f"option[text()='{value}']").click()
        self.drawn()

    def type(self, name: str, value: str) -> None:
        """Type into an empty field."""
        self.find(f"#{name}").send_keys(value)
        self.drawn()

    def click(self, name: str) -> None:
        """Click a button."""
        self.find(f"#{name}").click()
        self.drawn()

    def matches(self) -> int:
        """How many backups match the filter, as the page says."""
        return int(self.text("shown").split(" of ")[0].replace(",", ""))

    def ticks(self) -> tuple[int, int]:
        """First and last tick in view."""
        words = self.text("shown").replace(",", "").rstrip(". ").split()
        return int(words[-3]), int(words[-1])

    def act(self, build: Callable[[Any, Any], Any]) -> None:
        """Do something with the mouse on the timeline, whose middle is the origin."""
        canvas = self.find("#timeline")
        build(webdriver.ActionChains(self.browser), canvas).perform()
        self.drawn()

    def inks(self, canvas: str = "timeline") -> set[tuple[int, ...]]:
        """Colours on a canvas."""
        found = self.browser.execute_script(
            "const c = document.getElementById(arguments[0]), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, s = {};"
            "for (let i = 0; i < d.length; i += 4) s[[d[i], d[i + 1], d[i + 2]]] = 1; return Object.keys(s);",
            canvas,
        )
        return {tuple(int(part) for part in one.split(",")) for one in found}

    def complaints(self) -> list[str]:
        """What the browser's console holds."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def page(browser: Any, one_rank: Path, tmp_path: Path) -> Page:
    return Page(browser, [one_rank], tmp_path / "report.html")


COMMITTED, ROLLED_BACK = (0xB4, 0xDA, 0xB1), (0xD9, 0x48, 0x3B)


def test_it_opens_and_draws(page: Page) -> None:
    """R37: the page opens from a file without a message on the console, asks the network for nothing, and draws every part."""
    assert page.complaints() == []
    assert (
        page.browser.execute_script(
            "return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length;"
        )
        == 0
    )
    assert page.text("verdict") == "nothing is wrong"
    assert {COMMITTED, ROLLED_BACK} <= page.inks()
    edges = page.report.logs[0].tally.edges
    machine = page.text("machine")
    for (before, trigger, after), count in edges.items():
        if before != after:
            assert f"{trigger}  ×{count:,}" in machine
    assert {(0x2B, 0x6A, 0x2B), (0x6A, 0x2B, 0x8A)} <= page.inks("occupancy"), "both pools are drawn"


def test_it_filters(page: Page) -> None:
    """R37: node, request, state and outcome narrow the timeline and the tables; clearing brings all back."""
    everything = page.matches()
    page.choose("outcome", "rolled back")
    rolled = page.matches()
    assert rolled == page.report.logs[0].tally.outcomes["rolled_back"]
    assert COMMITTED not in page.inks()
    assert "committed" not in page.text("slowest").replace("outcome", "")
    page.click("clear")
    assert page.matches() == everything
    page.choose("state", "rolled back")
    assert page.matches() == rolled
    page.click("clear")
    page.type("request", "r1")
    assert 0 < page.matches() < everything
    page.click("clear")
    page.type("node", "1")
    assert page.matches() == 1
    page.type("node", "99999999")
    assert page.matches() == 0
    assert page.complaints() == []


def test_it_zooms_and_moves(page: Page) -> None:
    """R37: buttons, wheel, dragging, keys and a double click change what is in view; the view stays inside the run."""
    first, last = page.ticks()
    page.click("in")
    a, b = page.ticks()
    assert first < a < b < last
    page.act(lambda mouse, canvas: mouse.drag_and_drop_by_offset(canvas, 200, 0))
    c, d = page.ticks()
    assert c < a
    assert abs((d - c) - (b - a)) <= 1
    page.act(lambda mouse, canvas: mouse.scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -100))
    assert page.ticks()[1] - page.ticks()[0] < d - c
    page.act(lambda mouse, canvas: mouse.drag_and_drop_by_offset(canvas, 600, 0).drag_and_drop_by_offset(canvas, 600, 0))
    assert page.ticks()[0] == first
    page.act(lambda mouse, canvas: mouse.double_click(canvas))
    assert page.ticks() == (first, last)
    assert page.complaints() == []


def test_a_chosen_backup_shows_its_steps(page: Page, one_rank: Path) -> None:
    """R37: a click on a row of the timeline, or of a table, shows the steps of that backup as the log has them."""
    node = next(event["node"] for event in events_of(one_rank) if event.get("after") == "COMMITTED")
    mine = [event for event in events_of(one_rank) if event["event"] == "step" and event["node"] == node]
    page.type("node", str(node))
    page.act(lambda mouse, canvas: mouse.move_to_element_with_offset(canvas, 0, 8 + 10 - canvas.size["height"] // 2).click())
    assert page.text("chosen-title").startswith(f"node {node}, generation {mine[0]['generation']}")
    rows = page.browser.execute_script(
        "return [...document.querySelectorAll('#steps tr')].map(r => [...r.cells].map(c => c.textContent));"
    )
    assert [row[2] for row in rows] == [event["trigger"] for event in mine if event["generation"] == mine[0]["generation"]]
    page.click("clear")
    row = page.find("#failed tbody tr")
    failed = row.find_element("css selector", "td").text
    row.click()
    page.drawn()
    assert page.text("chosen-title").startswith(f"node {failed},")
    assert page.complaints() == []


def test_ranks_that_disagree_are_told(browser: Any, four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: the page of several ranks filters by rank, and says who disagrees on which fields."""
    events = events_of(four_ranks[2])
    at = find(events, step("agreed", after="COMMITTED"))
    events[at]["slots"] += 16
    page = Page(browser, [*four_ranks[:2], write(tmp_path / "edited.jsonl", events)], tmp_path / "report.html")
    everything = page.matches()
    assert "Rank 2 disagrees with rank 0" in page.text("ranks")
    assert "slots" in page.text("ranks")
    assert "ranks_disagree" in page.text("findings")
    page.choose("rank", "1")
    assert page.matches() * 3 == everything
    assert "of rank 1" in page.text("machine-of")
    assert page.complaints() == []


def test_a_hundred_thousand_events_are_usable(browser: Any, one_rank: Path, tmp_path: Path) -> None:
    """R37: with 100,000 events the page opens, zooms, filters and shows a chosen backup."""
    page = Page(browser, [long_log(one_rank, tmp_path / "long.jsonl")], tmp_path / "report.html")
    assert page.report.logs[0].events >= EVENTS
    everything = page.matches()
    assert everything > 5_000
    assert {COMMITTED, ROLLED_BACK} <= page.inks()
    first, last = page.ticks()
    for _ in range(5):
        page.act(lambda mouse, canvas: mouse.scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -100))
    assert page.ticks()[1] - page.ticks()[0] < (last - first) / 3
    page.act(lambda mouse, canvas: mouse.drag_and_drop_by_offset(canvas, 150, 100))
    page.choose("outcome", "rolled back")
    assert 0 < page.matches() < everything
    page.find("#failed tbody tr").click()
    page.drawn()
    assert page.browser.execute_script("return document.querySelectorAll('#steps tr').length;") > 0
    page.click("clear")
    assert page.matches() == everything
    assert page.complaints() == []


def long_log(log: Path, out: Path) -> Path:
    """The events of a log again and again, each time with other nodes at later ticks."""
    header, *rest = events_of(log)
    steps = [event for event in rest if event["event"] in ("step", "device_evicted")]
    ticks = max(event["tick"] for event in steps) + 1
    nodes = max(event.get("node", 0) for event in steps) + 1
    events = [header, rest[0]]
    copy = 0
    while len(events) < EVENTS:
        for event in steps:
            moved = {**event, "tick": event["tick"] + copy * ticks}
            for name in ("node", "head", "parent"):
                if name in event:
                    moved[name] = event[name] + copy * nodes
            events.append(moved)
        copy += 1
    return write(out, events)
