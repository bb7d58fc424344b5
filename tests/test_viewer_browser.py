"""The page in a real browser: Debian's chromium (`apt install chromium chromium-driver`), headless."""

from __future__ import annotations

import shutil

import pytest
from test_viewer import HOSTILE, TEXT, recording

from hf_dspark.viewer.page import write_page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium with its driver here: apt install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def chromium():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Browser:
    """One page, opened; no error may have been logged."""

    def __init__(self, driver, path, width=1280, height=900, scheme="light"):
        self.driver = driver
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.get(path.as_uri())
        assert self("return document.documentElement.dataset.ready") is not None

    def __call__(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        return self("return document.querySelector(arguments[0]).textContent", selector)

    def press(self, *keys):
        for key in keys:
            webdriver.ActionChains(self.driver).send_keys(key).perform()

    @property
    def here(self):
        return self("return document.querySelector('.round.here')?.id")

    @property
    def errors(self):
        return self.driver.get_log("browser")


@pytest.fixture
def page(tmp_path):
    def write(*recordings):
        write_page(list(recordings), tmp_path / "page.html")
        return tmp_path / "page.html"

    return write


def test_nothing_that_a_model_wrote_becomes_markup(chromium, page):
    browser = Browser(chromium, page(recording(TEXT, prompt=HOSTILE, drafter=HOSTILE, target=HOSTILE)))
    assert browser.errors == []
    assert browser.all("img") == []
    assert browser.text("h1") == HOSTILE
    assert browser.text(".answer") == TEXT


def test_whitespace_bytes_and_direction(chromium, page):
    browser = Browser(chromium, page(recording("שלום עולם\n🙂\tx  y", (1,))))
    assert browser("return getComputedStyle(document.querySelector('.answer')).unicodeBidi") == "plaintext"
    assert browser("return getComputedStyle(document.querySelector('.answer .break'), '::before').content") == '"⏎"'
    assert browser("return getComputedStyle(document.querySelector('.answer .tab'), '::before').content") == '"⇥"'
    shown = browser("return [...document.querySelectorAll('.answer .byte')].map((one) => one.dataset.shown)")
    assert shown[-3:] == ["<F0>", "<9F>", "<99>"] and "<D7>" in shown
    first, second = (browser.all(".answer > span")[k].rect["x"] for k in (1, 3))
    assert first > second  # Hebrew runs from right to left
    assert "·" in browser("return document.querySelector('#rounds').textContent")


def test_a_direction_override_ends_with_its_token(chromium, page):
    browser = Browser(chromium, page(recording("ab\u202ecd", (1,))))
    c, d = browser.all(".answer > span")[-2:]
    assert c.text == "c" and c.rect["x"] < d.rect["x"]


def test_keyboard(chromium, page):
    browser = Browser(chromium, page(recording("The quick brown fox jumps over the lazy dog. " * 20)))
    browser.press("j")
    assert browser.here == "round-0-0"
    browser.press("j", "j")
    assert browser.here == "round-0-2"
    focused = "return document.activeElement.dataset.slot"
    browser.press("\ue014")
    assert browser(focused) == "1"
    browser.press("\ue012", "k")
    assert browser.here == "round-0-1"
    assert "Round 2, position 1" in browser.text("#card")
    browser.press("\ue010")
    assert browser.here == f"round-0-{browser('return recordings[0].rounds.length') - 1}"
    assert browser(
        "const box = document.activeElement.getBoundingClientRect(); return box.top > 0 && box.bottom < innerHeight"
    )
    browser.press("\ue00c")
    assert browser("return document.getElementById('card').hidden")
    assert browser.errors == []


def test_card_by_focus_and_by_pointer(chromium, page):
    browser = Browser(chromium, page(recording("abcdefghijkl")))
    browser.press("j", *["\ue014"] * 3)
    card = browser.text("#card")
    assert "drafted and rejected; the target said e instead" in card
    assert "Confidence 50 %, survival 6.3 %" in card or "survival 6.2 %" in card
    assert "Drafterf75 %g25 %" in card and "Targetf50 %e25 %" in card
    browser.press("\ue00c")
    span = browser.all(".answer > span")[2]
    webdriver.ActionChains(chromium).move_to_element(span).perform()
    assert "drafted and accepted" in browser.text("#card")
    span.click()
    assert browser.here == "round-0-0"
    browser.all("svg.timeline")[0].click()
    assert browser.here not in (None, "round-0-0")
    assert browser.errors == []


def test_search(chromium, page):
    browser = Browser(chromium, page(recording("İ one needle here, " + "hay " * 300 + "and another needle")))
    browser.press("/", *"needle")
    marked = browser("return [...document.querySelectorAll('.answer .hit')].map((one) => one.textContent).join('')")
    assert marked == "needleneedle"
    browser.press("\ue007")
    first = browser.here
    assert browser.text("#found").startswith("1 of ")
    rounds = int(browser.text("#found").split()[2])
    browser.press(*["\ue007"] * (rounds - 1))
    assert int(browser.here.split("-")[2]) > 300 > int(first.split("-")[2])
    assert browser("const box = document.querySelector('.here').getBoundingClientRect(); return box.top < innerHeight")
    browser.press("\ue00c")
    assert browser.all(".answer .hit") == []
    browser.press("/", *"absent")
    assert browser.text("#found") == "0 rounds"
    browser.press("\ue00c", "/", *"YZ")
    assert browser.text("#found") == "0 rounds"


def test_search_finds_what_was_only_drafted(chromium, page):
    browser = Browser(chromium, page(recording("abcdefgh")))  # of which round 1 rejects an f
    browser.press("/", *"df", "\ue007")
    assert browser.text("#found") == "1 of 1 round"
    assert browser.all(".answer .hit") == []
    marked = browser("return [...document.querySelectorAll('.slot.hit')].map((one) => one.dataset.slot)")
    assert marked == ["2", "3"]
    assert browser.errors == []


def test_side_by_side(chromium, page):
    text = "The same text, made in other rounds."
    browser = Browser(chromium, page(recording(text), recording(text, (1,), method="the other")))
    assert len(browser.all(".panel")) == 2
    left, right = (element.rect for element in browser.all(".stretch")[0].find_elements("css selector", ".side"))
    assert left["y"] == right["y"] and left["x"] < right["x"]
    assert "aligned by position" in browser.text(".verdict")
    browser.press("j", "\ue004")  # the tabulator goes over to the other one
    assert browser("return document.activeElement.dataset.side") == "1"
    assert browser.errors == []


def test_light_and_dark(chromium, page):
    path = page(recording("abcdefghijkl"))
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = Browser(chromium, path)(colour)
    dark = Browser(chromium, path, scheme="dark")(colour)
    assert sum(map(int, light[4:-1].split(","))) > 600 > 200 > sum(map(int, dark[4:-1].split(",")))


@pytest.mark.parametrize("count", [1, 2])
def test_phones_do_not_scroll_sideways(chromium, page, count):
    text = "Averyveryverylongword" * 8 + TEXT
    browser = Browser(chromium, page(*[recording(text, slots=14)] * count), width=360, height=700)
    assert browser("return document.documentElement.scrollWidth") <= 360
    browser("select(0, 1, 0)")
    box = browser("return document.getElementById('card').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0 and box["right"] <= 360 and box["bottom"] <= 700


def test_long_generations_open_fast(chromium, page, record_property):
    one = recording("All the answer's words, again and again. " * 98)
    browser = Browser(chromium, page(one))
    ready = int(browser("return document.documentElement.dataset.ready"))
    record_property("milliseconds_to_open", ready)
    print(f"{len(one.answer)} tokens in {len(one.rounds)} rounds: drawn after {ready} ms")
    assert ready < 5000  # on a slow and busy machine; a tenth of it on a quiet one
    built = len(browser.all(".slot"))
    assert 0 < built < 500  # only what is near
    browser("scrollTo(0, document.body.scrollHeight / 2)")
    chromium.implicitly_wait(5)
    assert browser.all(f"#round-0-{len(one.rounds) // 2} .slot")
    assert browser.errors == []
