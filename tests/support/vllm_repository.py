"""Repositories that tests serve with vLLM: on a GPU, or without one, with an executor of the tests."""

import yaml

from support.servers import build
from support.vllm_arguments import COMMON_ARGUMENTS, installed_version


def vllm_repository(folder, *, model=None, ours=None, **arguments):
    """Build the rehearsal of the installed vLLM, and return it.

    :param model: a checkpoint in place of the trained one that the repository carries.
    :param ours: keys under triton_config, beside those of every test.
    :param arguments: engine arguments, beside those of every test.
    """
    options = () if model is None else ("--model", str(model))
    machine = ("--gpu", "h200", "--gpus", "1", "--vllm", installed_version())
    build(folder, "tiny", "--engine", "vllm", *machine, *options)
    path = folder / "tensorrt_llm/1/model.yaml"
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    # As the repositories of the embedded engines have it: greedy without a temperature, and no warm-up.
    same = {"default_max_tokens": 256, "default_sampling": {}, "warmup": None}
    settings = {"metrics_period_s": 0.1, **same, **(ours or {})}
    document |= {**COMMON_ARGUMENTS, **arguments, "triton_config": document["triton_config"] | settings}
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return folder
