"""The stand-in's DisaggregatedParams: the recorded fields of each release, and no other."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest

from deepseek_triton_build.catalog import load_release
from standin.loading import standin

FIVE = ("request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens")


@pytest.mark.parametrize("release", ["1.0.0", "1.1.0", "1.2.0", "1.2.1"])
def test_every_release_that_hands_over_has_the_five_fields(release: str, tmp_path: Path) -> None:
    record = load_release(release)
    path = tmp_path / "release.yaml"
    path.write_text(record.text)

    with standin(path):
        params = importlib.import_module("tensorrt_llm.llmapi").DisaggregatedParams
        names = [field.name for field in dataclasses.fields(params)]
        assert names == record.record["disaggregated_params"]["fields"]
        assert tuple(names[:5]) == FIVE
        assert dataclasses.asdict(params()) == dict.fromkeys(names)
        assert params(request_type="Context_Only").request_type == "context_only"
        with pytest.raises(ValueError, match="Unknown request type"):
            params(request_type="context")
        with pytest.raises(TypeError, match="disagg_request_id"):
            params(disagg_request_id=1)


def test_nothing_is_established_for_0_21(tmp_path: Path) -> None:
    record = load_release("0.21.0")
    path = tmp_path / "release.yaml"
    path.write_text(record.text)

    assert "disaggregated_params" not in record.record
    with standin(path):
        assert not hasattr(importlib.import_module("tensorrt_llm.llmapi"), "DisaggregatedParams")
