"""The share of accepted drafts: counted by hand, by the training network, and with the trained checkpoint."""

import json

import numpy as np
import pytest

from deepseek_backend.engines.reference.checkpoint_files import TensorFiles, read_config
from deepseek_backend.engines.reference.deepseek_model import DeepseekModel, ModelRunner
from deepseek_triton_build import model_repository
from tiny_checkpoint.acceptance import Drafting, DraftLayer, Shares, on_own_answers, on_text, own_answers, proposals
from tiny_checkpoint.architecture import CONFIG
from tiny_checkpoint.questions import questions

CHECKPOINT = model_repository() / "tensorrt_llm/1/tiny"


def test_an_engine_proposes_nothing_for_the_token_that_comes_with_an_accepted_one():
    for accepted, made in (
        ([], []),
        ([False, False], [False, False]),
        ([True, False, False], [True, False]),  # the first brings the second token along
        ([True, True, True], [True, True]),
        ([False, True, False, True], [False, True, True]),
    ):
        assert list(proposals(np.array(accepted, bool))) == made


def test_shares_are_counted_by_kind():
    shares = Shares()
    shares.add("sum", [True, False])
    shares.add("json", np.array([True, True]))
    shares.add("json", [])

    assert (shares.share("sum"), shares.share("json"), shares.share()) == (0.5, 1.0, 0.75)
    assert shares.table("text").splitlines()[2:] == ["| json | 2 | 100.0 |", "| sum | 2 | 50.0 |", "| all | 4 | 75.0 |"]


@pytest.mark.slow
def test_the_draft_layer_computes_what_the_training_network_does(tmp_path, monkeypatch):
    """With random weights that have gone through FP8; the engine here computes in float32 between them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    from tiny_checkpoint import export, network

    monkeypatch.setattr(network, "rounded_activation", lambda states: states)
    torch.manual_seed(19)
    trained = network.Network(CONFIG).eval()
    with torch.no_grad():
        for module in trained.modules():
            if isinstance(module, network.RMSNorm):
                module.weight.uniform_(0.5, 1.5)
            elif isinstance(module, network.Experts):
                module.bias.uniform_(0, 0.3)
        for name, weight in trained.named_parameters():
            if ("proj" in name and "eh_proj" not in name) and weight.dim() > 1:
                weight.copy_(network.rounded_weight(weight.flatten(0, -2)).view_as(weight))
            else:
                weight.copy_(weight.bfloat16())
    save_file(export.checkpoint_tensors(trained.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    token_ids = np.random.default_rng(19).integers(0, CONFIG["vocab_size"], 70).tolist()
    with torch.no_grad():
        row = torch.tensor([token_ids])
        mask = network.causal_mask(torch.zeros_like(row[:, :-1]))
        states = trained(row[:, :-1], mask)
        expected = trained.lm_head(trained.predict_ahead(states, row[:, 1:], mask))[0].numpy()
    config = read_config(tmp_path)
    tensors = TensorFiles(tmp_path, config.weight_block_size)
    own_states = ModelRunner(DeepseekModel(config, tensors), 1).prefill(token_ids[:-1])
    found = DraftLayer(config, tensors).logits(own_states, token_ids[1:])

    assert np.abs(own_states - states[0].numpy()).max() < 1e-4
    assert np.abs(found - expected).max() < 1e-4 < expected.std()


@pytest.fixture(scope="module")
def drafting():
    assert CHECKPOINT.is_dir(), f"there is no trained checkpoint at {CHECKPOINT}: restore it, or `make tiny-checkpoint`"
    return Drafting(CHECKPOINT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "texts"), [(480, 5), pytest.param(120, 15, marks=pytest.mark.nightly)], ids=["sample", "many"]
)
def test_the_trained_model_accepts_most_of_its_drafts(drafting, step, texts):
    asked = [question for question in questions() if question.split == "held_out"][::step]

    assert on_own_answers(drafting, asked, own_answers(CHECKPOINT, asked)).share() > 0.9
    assert on_text(drafting, texts).share() > 0.9


@pytest.mark.slow
def test_proposals_depend_on_the_token_before(drafting):
    """Random text is accepted by chance only: the share above is no accident of the counting."""
    words = np.random.default_rng(19).integers(3, 1200, 200).tolist()
    sentence = drafting.checkpoint.encode("The days are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday", True)

    assert drafting.accepted(sentence)[4:].mean() > 0.5
    assert drafting.accepted([0, *words]).mean() < 0.5
