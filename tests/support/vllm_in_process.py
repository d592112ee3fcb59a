"""A VllmEngine in this process, and a sink that holds it to the rules of the engine protocol."""

from contextlib import contextmanager
from functools import partial

from deepseek_backend.config import parse_config
from deepseek_triton_build import model_repository
from deepseek_triton_build.data.vllm import load_vllm
from support import engine_driver
from support.engine_driver import driven, make_request
from support.vllm_arguments import COMMON_ARGUMENTS, installed_version, reference_arguments

TINY = model_repository() / "tensorrt_llm/1/tiny"


StepLog = partial(engine_driver.StepLog, one_step_a_call=True)
submitted = partial(engine_driver.submitted, one_step_a_call=True)
answered = partial(engine_driver.answered, one_step_a_call=True)


def a_request(name, prompt="The capital of France is", max_tokens=40, **fields):
    return make_request(name, prompt, max_tokens=max_tokens, **fields)


@contextmanager
def running_engine(folder, *, model=TINY, release=None, **arguments):
    """A VllmEngine that is started, and stopped at the end."""
    ours = arguments.pop("triton_config", {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "release.yaml").write_text(release or load_vllm(installed_version()).text, encoding="utf-8")
    document = {
        "model": str(model),
        **COMMON_ARGUMENTS,
        **reference_arguments(),
        **arguments,
        "triton_config": {"engine": "vllm", **ours},
    }
    with driven(parse_config(document, version_dir=folder)) as driver:
        yield driver.engine
