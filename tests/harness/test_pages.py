"""Every page in a browser: on a phone and on a wide screen, light and dark."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_report

from fourfold.cli.main import main
from fourfold.engine.verdict import Verdict
from fourfold.grading import report as grading_report
from fourfold.grading.results import Graded
from fourfold.operations.outcomes import Kind
from fourfold.performance import report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install -e '.[browser]'")
SIZES = {"telephone": (390, 844), "desk": (1280, 900)}
PAGES = ("verdict", "grading", "candidate", "report", "index", "timings")
# Returns the text whose contrast with its background is below 4.5, as WCAG 2 computes it.
FAINT = """() => {
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || node.closest("script, title, details:not([open]) > :not(summary)")) continue;
    const style = getComputedStyle(node), ink = node.closest("svg") ? style.fill : style.color;
    const [low, high] = [light(ink), light(behind(node))].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) found.push(`${text}: ${ink} on ${behind(node)}`);
  }
  return found;
}"""
# Returns the texts of a chart that overlap, or leave their chart.
COLLIDING = """() => [...document.querySelectorAll("svg")].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  const outside = texts.filter(([, a]) => a.left < frame.left || a.right > frame.right || a.bottom > frame.bottom);
  const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
  const over = texts.flatMap(([name, a], at) => texts.slice(at + 1).filter(([, b]) => !apart(a, b))
    .map(([other]) => [`${name} over ${other}`]));
  return [...outside, ...over].map(([name]) => name);
})"""
# Returns the headings that nothing follows before the next one of their rank, and those of columns without cells.
EMPTY = """() => [...document.querySelectorAll("h2, h3")].filter(heading => {
  const next = heading.nextElementSibling;
  return !next || (/^H[23]$/.test(next.tagName) && next.tagName <= heading.tagName);
}).concat([...document.querySelectorAll("table")].flatMap(table => {
  const [first, ...rows] = table.rows, cells = row => [...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0);
  return [...first.querySelectorAll("th[scope=col]")].slice(Math.max(0, ...rows.map(cells)));
})).map(heading => heading.textContent)"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one page of each kind; return their paths."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "verdict.html").write_text(test_report.verdict(Verdict).html())
    graded = [
        test_report.verdict(Graded, id=f"{'long-' * 20}{n}", stage="full", repeat="fourfold grade --id x")
        for n in range(3)
    ]
    index = grading_report.write(graded, folder / "grading")
    part = test_report.measured()
    part["benchmarks"] += [test_report.timed("triton", 10**n, 8e-12 * 10**n + 3e-6) for n in range(3, 10)]
    for number, one in enumerate(part["benchmarks"]):
        one["extra_info"]["flops"] *= 0.02 if number % 2 else 300
    report.write(folder / "report", "performance", part)
    failures, about = test_report.FAILURES, test_report.ABOUT
    report.write(folder / "report", "verification", report.verification(test_report.matrix().tallies, failures, about))
    (candidate, *_) = sorted((folder / "grading" / "candidates").iterdir())
    saved = test_report.saved_results(folder)
    main(["report", *map(str, saved), "--out", str(folder / "all")])
    (timings,) = (folder / "all").glob("*-timings/index.html")
    found = (folder / "verdict.html", index, candidate, folder / "report" / "index.html")
    return dict(zip(PAGES, (*found, folder / "all" / "index.html", timings), strict=True))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium: the one of the system, or playwright's."""
    system = shutil.which("chromium") or shutil.which("google-chrome")
    with playwright.sync_playwright() as tool:
        try:
            started = tool.chromium.launch(executable_path=system, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"there is no Chromium: playwright install chromium ({str(error).splitlines()[0]})")
        yield started
        started.close()


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[*SIZES])
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    return SIZES[request.param]


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path], name: str, size: tuple[int, int], scheme: str) -> Iterator[Any]:
    width, height = size
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab.goto(pages[name].as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    yield tab
    tab.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable(opened: Any, name: str, size: tuple[int, int]) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth") == size[0]
    assert opened.evaluate(FAINT) == []
    assert opened.evaluate(COLLIDING) == []
    assert opened.evaluate(EMPTY) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(browser: Any, pages: dict[str, Path], name: str) -> None:
    tab = browser.new_page()
    tab.goto(pages[name].as_uri())
    links = tab.eval_on_selector_all("a[href]", "all => all.map(one => one.href)")
    assert links
    for link in links:
        place, _, anchor = link.partition("#")
        assert Path(place.removeprefix("file://")).is_file()
        assert not anchor or tab.evaluate("id => document.getElementById(id) !== null", anchor)
    tab.close()


def test_a_dark_page_is_dark(browser: Any, pages: dict[str, Path]) -> None:
    tab = browser.new_page(color_scheme="dark")
    for path in pages.values():
        tab.goto(path.as_uri())
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    tab.close()


def test_the_page_of_a_candidate_marks_the_line_that_failed_and_leads_back(
    browser: Any, pages: dict[str, Path]
) -> None:
    tab = browser.new_page()
    tab.goto(pages["grading"].as_uri())
    tab.click("tbody a")
    assert "raise KeyError" in tab.inner_text(".failing")
    assert tab.locator(".failing").count() == 1
    assert tab.inner_text("#repeat + pre") == "fourfold grade --id x"
    first, second, third = (tab.locator(".arguments > div").nth(place) for place in range(3))
    assert first.locator("td").count() == 21  # 3 rows of 6 numbers of a long array, and the ellipsis
    assert "float32[3, 40]" in first.inner_text()
    assert second.locator("td").all_inner_texts() == third.locator("td").all_inner_texts() == ["0", "1", "2", "3"]
    tab.click("text=all results")
    assert tab.url == pages["grading"].as_uri()


def test_the_index_of_candidates_filters_by_verdict_and_by_words(browser: Any, pages: dict[str, Path]) -> None:
    tab = browser.new_page()
    tab.goto(pages["grading"].as_uri())
    assert tab.locator("tbody tr:visible").count() == 3
    tab.fill("input[type=search]", "long-1")
    assert tab.locator("tbody tr:visible").count() == 1
    tab.uncheck(f"input[value={Kind.WRONG}]")
    assert tab.locator("tbody tr:visible").count() == 0
