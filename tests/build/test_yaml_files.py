"""The package's YAML files, and their twins in JSON."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build.data.yaml_files import json_twins, load_yaml
from deepseek_triton_build.text import yaml_flow

TWINS = json_twins()


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS, ids=lambda path: path.name)
def test_a_twin_holds_what_the_yaml_says(twin):
    """JSON knows no keys but text: another key would come back as another one."""
    content = yaml.safe_load(twin.with_suffix("").read_text("utf-8"))

    assert json.loads(TWINS[twin])["content"] == content
    assert json.loads(twin.read_bytes()) == json.loads(TWINS[twin]), "make generated writes it again"


def test_every_yaml_file_of_the_package_has_a_twin():
    package = Path(load_yaml.__code__.co_filename).parents[1]
    assert {path.with_name(f"{path.name}.json") for path in package.rglob("*.yaml")} == set(TWINS)


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """The file gpus.yaml with its twin, in a package of its own."""
    module = ModuleType("another_package")
    module.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "another_package", module)
    [twin] = [path for path in TWINS if path.name == "gpus.yaml.json"]
    for path in (twin, twin.with_suffix("")):
        shutil.copy(path, tmp_path)
    return tmp_path / "gpus.yaml"


def test_the_twin_is_read_while_the_yaml_is_as_it_was(gpus, monkeypatch):
    monkeypatch.setattr("deepseek_triton_build.data.yaml_files.parse_yaml", lambda text: pytest.fail("it was parsed"))

    assert load_yaml("another_package", "gpus.yaml") == yaml.safe_load(gpus.read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda gpus: gpus.write_text("a: 1"), lambda gpus: Path(f"{gpus}.json").unlink()])
def test_an_edited_yaml_counts_and_not_its_twin(gpus, change):
    change(gpus)

    assert load_yaml("another_package", "gpus.yaml") == yaml.safe_load(gpus.read_text("utf-8"))


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
_WORDS = st.sampled_from(["yes", "No", "ON", "off", "true", "Null", "y", "n", "a-b", "x/y.z", "1e5", "e1", "_", ".nan"])


@pytest.mark.slow
@given(st.recursive(_SCALARS | _WORDS, lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_a_value_in_flow_style_is_read_as_it_was(value):
    text = yaml_flow(value)

    assert "\n" not in text
    assert yaml.safe_load(f"[{text}]") == [value]


@pytest.mark.parametrize("value", [1e5, 1e22, 1e-7, 0.6, -2.5, 3e300, math.inf])
def test_a_float_is_read_as_a_float(value):
    assert yaml.safe_load(yaml_flow(value)) == value
    assert isinstance(yaml.safe_load(yaml_flow(value)), float)
