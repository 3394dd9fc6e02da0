"""The HTML page of a comparison: the verdict first, everything inside, legible at any width."""

import re
import shutil
import time
from pathlib import Path

import pytest
from fp8_nemo.recipes.compare import main

from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.runs.run_dir import freeze
from tests.conftest import slowed

from .browser import CHROMIUM, Browser

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "runs.jsonl.gz"
NEMO = ("backend=nemo", "glue=stock", "precision=bf16", "cluster.gpus_per_node=1")
SIZES = [(360, 740), (768, 1024), (1400, 900), (2560, 1300)]
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)"
)
UNFOLD = "document.querySelectorAll('details').forEach(each => each.open = true)"
SEEN = "[...document.querySelectorAll('body *')].filter(each => each.checkVisibility())"
CUT_OFF = f"""{SEEN}.filter(each => !each.closest('.scroll > *') &&
  (each.getBoundingClientRect().right > innerWidth + 1 || each.getBoundingClientRect().left < -1))
  .map(each => each.outerHTML.slice(0, 80))"""
BELOW = """[...document.querySelectorAll('.verdict h1, .verdict .why')].filter(
  each => each.getBoundingClientRect().bottom > innerHeight).map(each => each.textContent)"""
TEXT_SIZES = f"""{SEEN}.filter(each => [...each.childNodes].some(
  node => node.nodeType == 3 && node.data.trim())).map(each => {{
    const scale = each.ownerSVGElement ? each.getScreenCTM().a : 1;
    return [scale * parseFloat(getComputedStyle(each).fontSize), each.textContent];}})"""
CONTRAST = f"""(() => {{
  const light = color => {{
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(each => each / 255)
      .map(each => each <= .03928 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  }};
  const behind = each => {{
    for (; each; each = each.parentElement) {{
      const color = getComputedStyle(each).backgroundColor;
      if (!color.startsWith('rgba(0, 0, 0, 0')) return color;
    }}
    return 'rgb(255, 255, 255)';
  }};
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const text = {SEEN}.filter(each => [...each.childNodes].some(
    node => node.nodeType == 3 && node.data.trim()));
  const lines = [...document.querySelectorAll('svg path')].filter(
    each => parseFloat(getComputedStyle(each).strokeWidth) == 2);
  const found = (all, key) => Math.min(...all.map(
    each => ratio(light(getComputedStyle(each)[each.ownerSVGElement ? key : 'color']),
                  light(behind(each)))));
  return [found(text, 'fill'), found(lines, 'stroke')];
}})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Make the page of the runs that the repository keeps."""
    folder = tmp_path_factory.mktemp("compared")
    shutil.copy(RUNS, folder / "runs.jsonl.gz")
    assert main([str(folder / "runs"), "--html"]) == 0
    return folder / "runs" / "report" / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Start one browser for all pages."""
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def test_the_page_begins_with_what_to_take(page):
    text = page.read_text()
    assert "<title>Take fp8-e2e-tis for now</title>" in text
    headline, why, caveat = re.findall(r"<(?:h1|p)[^>]*>(.*?)</(?:h1|p)>", text)[1:4]
    assert headline == "Take fp8-e2e-tis for now"
    assert why.startswith("not shown to be worse than BF16, but may lose up to 1.7 points (+0.3")
    assert caveat.startswith("Speed cannot be known from these runs")


def test_the_page_has_everything_inside_and_no_script(page):
    text = page.read_text()
    assert text.count("<figure>") == 3 and text.count("<svg") == 6 and "<img" not in text
    assert not re.findall(r"<script|<link[^>]*stylesheet|(?:src|href)=\"http|@import", text)
    assert not re.findall(r"`|\{\{|runs` below|None|nan", re.sub(r"<style>.*?</style>", "", text))
    assert "accuracy is" in text and "compare /" in text


def test_no_two_figures_share_an_id(page):
    ids = re.findall(r' id="([^"]+)"', page.read_text())
    assert ids and len(ids) == len(set(ids))


def test_each_cell_has_a_card_with_its_state_in_words(page):
    cards = re.findall(r'<article class="card ([^"]+)">(.*?)</article>', page.read_text())
    words = [(look, re.findall(r'class="badge [^"]*">(.*?)<', card)[0]) for look, card in cards]
    assert words == [
        ("unsure taken", "✓ take for now"), ("unsure", "? not decided"), ("bad", "✗ out"),
        ("plain", "BF16"),
    ]  # fmt: skip
    assert [re.findall(r"<dd><.*?>(. \w+)<", card) for _, card in cards] == [
        ["● healthy"], ["▲ watch"], ["▲ watch"], ["● healthy"],
    ]  # fmt: skip


def test_a_figures_title_is_what_it_shows_and_its_legend_what_it_draws(page):
    figures = re.findall(r"<figure><h2>(.*?)</h2>(.*?)</figure>", page.read_text(), re.DOTALL)
    assert [title for title, _ in figures] == [
        "fp8-kv-attn-none: less accurate than BF16; fp8-e2e-tis and fp8-kv-attn-tis: not decided",
        "The reward rises in every cell, by 0.33 to 0.34",
        "The mean KL is highest in fp8-kv-attn-tis, 5.2e-03; below 1e-07, so not drawn: "
        "bf16-none and fp8-e2e-tis",
    ]
    drawn = [set(re.findall(r">((?:bf16|fp8)-[\w-]+)</text>", svg)) for _, svg in figures]
    assert len(drawn[0]) == len(drawn[1]) == 4
    assert drawn[2] == {"fp8-kv-attn-none", "fp8-kv-attn-tis"}


def test_it_takes_a_few_seconds(tmp_path):
    shutil.copy(RUNS, tmp_path / "runs.jsonl.gz")
    start = time.process_time()  # not the clock on the wall: tests share cores
    assert main([str(tmp_path / "runs"), "--html"]) == 0
    assert time.process_time() - start < 10 * slowed()


def frozen(tmp_path: Path, *words: str) -> Path:
    """Freeze a run that has not begun."""
    [recipe] = compose([*words, f"outputs={tmp_path}/outputs"])
    [run] = freeze([plan_recipe(recipe)])
    return run.path


def test_runs_that_have_not_begun_are_cards_of_dashes_without_a_figure(tmp_path):
    frozen(tmp_path, "precision=bf16", "correction=none")
    frozen(tmp_path, "precision=fp8-e2e")
    assert main([str(tmp_path / "outputs"), "--html"]) == 0
    text = (tmp_path / "outputs" / "report" / "report.html").read_text()
    assert "<h1>Undecided</h1>" in text and "Resume what has stopped" in text
    assert "<figure>" not in text and text.count("<article") == 2 and text.count("0/40") > 2
    assert "<details open><summary>Resume" in text, "what to run is not folded"


def test_a_page_without_a_verdict_says_that_local_runs_are_an_emulation(tmp_path):
    run = frozen(tmp_path, "precision=bf16")
    assert main([str(run), "--html"]) == 0
    assert "emulates FP8 on a CPU" in (run / "report" / "report.html").read_text()


def test_a_setting_with_a_tag_stays_text(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    for text in (evil, "</article>"):
        frozen(tmp_path, f"+nemo.policy.generation.vllm_kwargs.revision='{text}'", *NEMO)
    assert main([str(tmp_path / "outputs"), "--html"]) == 0
    text = (tmp_path / "outputs" / "report" / "report.html").read_text()
    assert "<img" not in text and text.count("</article>") == 2
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_is_legible_at_any_width_light_or_dark(page, browser, width, height, dark):
    browser.open(page, width, height, dark=dark)
    assert browser.evaluate(BELOW) == [], "the verdict is not on the first screen"
    assert browser.evaluate(CUT_OFF) == []
    browser.evaluate(UNFOLD)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(CUT_OFF) == []
    assert [each for each in browser.evaluate(TEXT_SIZES) if each[0] < 12] == []
    text, lines = browser.evaluate(CONTRAST)
    assert text >= 4.5 and lines >= 3
    asked = [
        e["params"]["request"]["url"] for e in browser.events if "request" in e.get("params", {})
    ]
    assert all(url.startswith(("file:", "data:")) for url in asked) and asked
    assert not [
        e
        for e in browser.events
        if e.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled")
    ]


@in_a_browser
def test_the_dark_scheme_is_dark(page, browser):
    paper = "getComputedStyle(document.body).backgroundColor"
    browser.open(page, 1400, 900)
    light = browser.evaluate(paper)
    browser.open(page, 1400, 900, dark=True)
    assert (light, browser.evaluate(paper)) == ("rgb(255, 255, 255)", "rgb(20, 22, 26)")


@in_a_browser
def test_print_shows_what_a_screen_folds_and_is_light(page, browser):
    shown = "document.querySelector('.more table').checkVisibility({contentVisibilityAuto: true})"
    height = "document.documentElement.scrollHeight"
    browser.open(page, 800, 1100, dark=True)
    folded = browser.evaluate(height)
    assert not browser.evaluate(shown)
    browser.open(page, 800, 1100, dark=True, media="print")
    assert browser.evaluate(shown) and browser.evaluate(height) > 1.5 * folded
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor").endswith("255)")
    assert browser.evaluate(CUT_OFF) == []


@in_a_browser
def test_a_page_of_many_cells_and_two_models_is_not_cut_off_either(browser, tmp_path):
    shutil.copy(RUNS.parent / "study" / "stress-tiny.jsonl.gz", tmp_path / "runs.jsonl.gz")
    assert main([str(tmp_path / "runs"), "--html"]) == 0
    page = tmp_path / "runs" / "report" / "report.html"
    browser.open(page, 360, 740)
    browser.evaluate(UNFOLD)
    assert browser.evaluate(CUT_OFF) == []
    assert page.read_text().count('<div class="board">') == 2
