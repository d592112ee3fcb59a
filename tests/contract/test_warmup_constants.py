"""The backend's own warm-up and `warm server` send the same tokens and have the same measure of steady."""

from deepseek_backend import engine_warmup
from deepseek_triton_tools.warming.server import rounds


def test_both_warm_ups_send_the_same_tokens():
    assert engine_warmup._MANY_IDS == rounds._MANY_IDS
    assert engine_warmup._FEW_IDS == rounds._FEW_IDS


def test_both_warm_ups_have_the_same_share_for_steady():
    assert engine_warmup.STEADY == rounds._STEADY
