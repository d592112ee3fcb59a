"""The Python of docs/gateway.md, against the real gateway and the tiny model: what it prints is what the page shows."""

import itertools
import subprocess
import sys

import pytest

from support.documents import snippets

PAGE = snippets(page="docs/gateway.md")
SHOWN = {
    str(asked): (asked, shown.text)
    for asked, shown in itertools.pairwise(PAGE)
    if (asked.language, shown.language) == ("python", "text")
}


def test_every_program_of_the_page_has_its_output_below_it():
    assert {str(snippet) for snippet in PAGE if snippet.language == "python"} == SHOWN.keys()


@pytest.mark.parametrize(("snippet", "shown"), SHOWN.values(), ids=SHOWN)
def test_a_program_prints_what_the_page_shows(gateway_url, snippet, shown):
    program = snippet.text.replace("http://localhost:9000", gateway_url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == shown.removesuffix("\n")
