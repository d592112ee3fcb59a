"""The report in Chromium, from a file and without a network."""

from contextlib import contextmanager

import pytest

from deepseek_triton_tools.bench.report import ExpectedPoint, NamedResult, write_report
from support.browser import CHROMIUM, Browser
from support.made_up_bench import made_up_point, made_up_result

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]

EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
PLACES = "[...document.querySelectorAll('.picture')]"
LOADS = (1, 8, 64, 512)
STROKE = "getComputedStyle(document.querySelector('.js-line')).stroke"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens the report with the network off."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    results = [
        NamedResult(name=EVIL, result=made_up_result([made_up_point(n) for n in LOADS], model=EVIL)),
        NamedResult(name="repeated", result=made_up_result([made_up_point(n, runs=(1.2, 1.3)) for n in LOADS])),
    ]
    write_report(path, results, [ExpectedPoint(tps_user=30, tps_gpu=900)])
    with Browser(tmp_path_factory.mktemp("profile")) as browser:

        @contextmanager
        def open_it(**options):
            with browser.page("about:blank#", **options) as page:
                page.command("Network.enable")
                off = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
                page.command("Network.emulateNetworkConditions", **off)
                page.open(path.as_uri())
                page.wait(f"{PLACES}.every((place) => place.querySelector('.js-line'))")
                yield page
                assert page.complaints() == []

        yield open_it


@pytest.mark.nightly
def test_every_picture_is_drawn_within_the_page(opened, subtests):
    for width, dark in ((400, False), (400, True), (1400, False), (1400, True)):
        with subtests.test(width=width, dark=dark), opened(width=width, dark=dark) as page:
            points = page.run(f"{PLACES}.map((place) => place.querySelectorAll('.points path').length)")
            assert points == [1 + 2 * len(LOADS), *[4 * len(LOADS)] * 3, 0]  # a timeline has lines only
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
            assert page.run(f"{PLACES}.every((place) => place.querySelector('svg').clientWidth <= place.clientWidth)")
            assert page.run("document.title").startswith("Benchmark of <img src=x")


def test_plotly_finds_nothing_wrong_and_no_label_covers_another(opened):
    with opened(width=400) as page:
        found = page.run("pictures.map(themed).map(({data, layout}) => Plotly.validate(data, layout) ?? [])")
        assert found == [[]] * page.run("pictures.length")
        assert page.run(f"""{PLACES}.every((place) => {{
            const shown = [...place.querySelectorAll(".textpoint")].filter((one) => one.style.visibility !== "hidden");
            const boxes = shown.map((one) => one.getBoundingClientRect());
            return boxes.every((a, n) => boxes.slice(n + 1).every((b) =>
                a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top));
        }})""")


def test_the_colours_follow_the_scheme_and_another_run_is_shown_in_the_timeline(opened):
    with opened() as page:
        light = page.run(STROKE)
        for value, differs in (("dark", "!=="), ("light", "===")):
            scheme = {"name": "prefers-color-scheme", "value": value}
            page.command("Emulation.setEmulatedMedia", features=[scheme])
            page.wait(f"{STROKE} {differs} '{light}'")

        assert page.run("run.options.length") == 3 * len(LOADS)
        line = "run.closest('section').querySelector('.js-line').getAttribute('d')"
        before = page.run(line)
        page.run("run.selectedIndex = run.options.length - 1; run.dispatchEvent(new Event('change'))")
        page.wait(f"{line} !== '{before}'")
        alt = page.run("run.closest('section').querySelector('.picture').getAttribute('aria-label')")
        assert "512 requests in flight" in alt
