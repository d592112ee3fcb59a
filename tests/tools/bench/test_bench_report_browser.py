"""The report in Chromium, from a file and without a network."""

import pytest

from deepseek_triton_tools.bench.report.report_page import write_report
from deepseek_triton_tools.bench.report.report_points import ExpectedPoint, NamedResult
from support.browser import CHROMIUM, Browser
from support.made_up_bench import made_up_point, made_up_result

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]

EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
DRAWN = "[...document.querySelectorAll('.picture')].every((place) => place.querySelector('.js-line'))"
PLACES = "[...document.querySelectorAll('.picture')]"
LOADS = (1, 8, 64, 512)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    repeated = [made_up_point(n, runs=(1.2, 1.3)) for n in LOADS]
    results = [
        NamedResult(name=EVIL, result=made_up_result([made_up_point(n) for n in LOADS], model=EVIL)),
        NamedResult(name="repeated", result=made_up_result(repeated)),
    ]
    write_report(path, results, [ExpectedPoint(name=EVIL, tps_user=30, tps_gpu=900)])
    return path.as_uri()


def opened(page, address):
    """Open it with the network off."""
    page.command("Network.enable")
    page.command("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    page.open(address)
    page.wait(DRAWN)


def color_of_first_line(page):
    return str(page.run("getComputedStyle(document.querySelector('.js-line')).stroke"))


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_picture_is_drawn_within_the_page(browser, address, width, dark):
    with browser.page("about:blank#", width=width, dark=dark) as page:
        opened(page, address)

        points = page.run(f"{PLACES}.map((place) => place.querySelectorAll('.points path').length)")
        assert points == [1 + 2 * len(LOADS), *[4 * len(LOADS)] * 6, 0]  # a timeline has lines only
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.run(f"{PLACES}.every((place) => place.querySelector('svg').clientWidth <= place.clientWidth)")
        assert page.run("document.title").startswith("Benchmark of <img src=x")
        assert page.complaints() == []


def test_plotly_finds_nothing_wrong_with_the_figures(browser, address):
    with browser.page("about:blank#") as page:
        opened(page, address)
        assert page.run("pictures.map(themed).map(({data, layout}) => Plotly.validate(data, layout) ?? [])") == [
            [] for _ in range(page.run("pictures.length"))
        ]


def test_no_label_covers_another(browser, address):
    with browser.page("about:blank#", width=400) as page:
        opened(page, address)
        assert page.run(f"""{PLACES}.every((place) => {{
            const shown = [...place.querySelectorAll(".textpoint")].filter((one) => one.style.visibility !== "hidden");
            const boxes = shown.map((one) => one.getBoundingClientRect());
            return boxes.every((a, n) => boxes.slice(n + 1).every((b) =>
                a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top));
        }})""")


def test_the_colours_follow_the_scheme(browser, address):
    with browser.page("about:blank#") as page:
        opened(page, address)
        light = color_of_first_line(page)
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        page.command("Emulation.setEmulatedMedia", features=[dark])
        page.wait(f"getComputedStyle(document.querySelector('.js-line')).stroke !== '{light}'")
        page.command("Emulation.setEmulatedMedia", features=[dark | {"value": "light"}])
        page.wait(f"getComputedStyle(document.querySelector('.js-line')).stroke === '{light}'")
        assert page.complaints() == []


def test_another_run_is_shown_in_the_timeline(browser, address):
    with browser.page("about:blank#") as page:
        opened(page, address)
        assert page.run("run.options.length") == 3 * len(LOADS)
        before = page.run("run.closest('section').querySelector('.js-line').getAttribute('d')")
        page.run("run.selectedIndex = run.options.length - 1; run.dispatchEvent(new Event('change'))")
        page.wait(f"run.closest('section').querySelector('.js-line').getAttribute('d') !== '{before}'")
        alt = page.run("run.closest('section').querySelector('.picture').getAttribute('aria-label')")
        assert "512 requests in flight" in alt
