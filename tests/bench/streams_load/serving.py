"""The systems under test: a repository for each, and the simulated engine on its own."""

import json
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from bench._served import repository
from bench.streams_load.cases import CUMULATIVE, DELTA, ENGINE, OURS, PEER, PEER_10, PEERS, TRTLLM_1, TRTLLM_10, Case

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.simulated import SimulatedEngine
from deepseek_backend.engines.simulated.simulated_engine import NEUTRAL_STEP_S
from deepseek_backend.errors import BackendError
from deepseek_triton_build import model_repository
from support.servers import STANDIN

SYSTEMS = (OURS, DELTA, CUMULATIVE, ENGINE, TRTLLM_1, TRTLLM_10, PEER, PEER_10)
_STREAM_INTERVALS = {TRTLLM_1: 1, TRTLLM_10: 10, PEER: 1, PEER_10: 10}
"""Of the systems on the stand-in."""
PROMPT = "Prove that the square root of two is irrational, in one paragraph."

_MINIMAL = Path(__file__).parents[1] / "minimal"
_STAMPED = """

import itertools as _itertools
import time as _time

_IDS = bytes.maketrans(bytes(range(253)), bytes(range(len(SPECIAL), 256)))


def _stamp(_):
    return f" {_time.monotonic_ns() // 1000:015d}".encode().translate(_IDS)


def answer(prompt_token_ids, params):
    return _itertools.chain.from_iterable(map(_stamp, _itertools.repeat(None)))
"""
"""Put behind the stand-in's answers: stamps, a byte a token, and no end but max_tokens, for a peer may not know
ignore_eos."""

_PEER_UTILS = """
def global_mpi_rank():
    return 0


def global_mpi_size():
    return 1
"""
"""What a model.py in upstream's manner asks of tensorrt_llm._utils."""

_IGNORED = shutil.ignore_patterns("__pycache__")


def engine_options(case: Case) -> dict[str, Any]:
    """Of the simulated engine: room for every stream in one batch."""
    room = max(8192, 2 * case.num_streams)
    options: dict[str, Any] = {
        "text": "stamps",
        "max_batch_size": room,
        "max_num_tokens": 8 * room,
        "kv_cache_tokens": max(4 << 20, 2 * case.num_streams * (case.num_tokens + 100)),
    }
    if case.rate:
        options |= {"pace": "real", "speed": case.rate * NEUTRAL_STEP_S}
    return options


def chars_per_token(system: str) -> int:
    """The stand-in's tokens are bytes, the simulated engine's whole stamps."""
    return 1 if system in _STREAM_INTERVALS else 16


def make_repository(system: str, case: Case, folder: Path, peer: Path | None) -> Path:
    """The repository of a system for a case, in a new folder."""
    if system == OURS:
        return repository(folder, "simulated", engine_options=engine_options(case))
    if system in (DELTA, CUMULATIVE):
        return _minimal(folder, case, "delta" if system == DELTA else "cumulative")
    stream_interval = _STREAM_INTERVALS[system]
    if system in PEERS:
        return _peer(folder, case, peer, stream_interval)
    made = repository(folder, "trtllm")
    _prepare(made / "tensorrt_llm", case, stream_interval)
    return made


def _minimal(folder: Path, case: Case, text: str) -> Path:
    model = folder / "tensorrt_llm"
    shutil.copytree(_MINIMAL, model, ignore=_IGNORED)
    backend = model_repository() / "tensorrt_llm/1/deepseek_backend"
    shutil.copytree(backend, model / "1/deepseek_backend", ignore=_IGNORED)
    parameters = {"text": text, "engine_options": json.dumps(engine_options(case))}
    with (model / "config.pbtxt").open("a", encoding="utf-8") as file:
        for name, value in parameters.items():
            file.write(f"parameters {{ key: {json.dumps(name)} value {{ string_value: {json.dumps(value)} }} }}\n")
    return folder


def _peer(folder: Path, case: Case, peer: Path, stream_interval: int) -> Path:
    model = folder / peer.name
    shutil.copytree(peer, model, ignore=_IGNORED)
    shutil.copytree(STANDIN, model / "1/tensorrt_llm", ignore=_IGNORED)
    (model / "1/tensorrt_llm/_utils.py").write_text(_PEER_UTILS, encoding="utf-8")
    release = model / "1/release.yaml"
    if not release.exists():
        ours = repository(folder.with_name("for-release"), "trtllm")
        shutil.copy(ours / "tensorrt_llm/1/release.yaml", release)
    _let_ignored(release)
    _prepare(model, case, stream_interval)
    return folder


def _let_ignored(release: Path) -> None:
    """What the release ignores is refused by the stand-in, which is to find it in ours; upstream says best_of=1."""
    document = yaml.safe_load(release.read_text(encoding="utf-8"))
    document["sampler"]["always"] = list(document["sampling_params"])
    release.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def _prepare(model: Path, case: Case, stream_interval: int) -> None:
    """The stand-in answers with stamps, in batches with room for all; its arguments are where upstream has them too."""
    answers = model / "1/tensorrt_llm/_answers.py"
    answers.write_text(answers.read_text(encoding="utf-8") + _STAMPED, encoding="utf-8")
    path = model / "1/model.yaml"
    document = yaml.safe_load(path.read_text()) if path.exists() else {}
    document |= {"stream_interval": stream_interval, "max_batch_size": max(case.num_streams, 256)}
    path.write_text(yaml.safe_dump(document, sort_keys=False))


class _Collecting:
    """A sink that joins the text of each request when all are done, and does nothing else."""

    def __init__(self, num_requests: int) -> None:
        self.texts: dict[str, list[str]] = {str(number): [] for number in range(num_requests)}
        self.num_tokens = 0
        self.error: BackendError | None = None
        """The last one, of a request that failed."""
        self.done = threading.Event()
        self._open = num_requests

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        for request, step in steps:
            self.texts[request.request_id].append(step.text)
            self.num_tokens += len(step.token_ids)
            self.error = step.error or self.error
            if step.finish_reason is not None or step.error is not None:
                self._open -= 1
        if not self._open:
            self.done.set()


def consume_engine(case: Case, results: Any) -> None:
    """In a process of its own: tokens a second of the engine alone, from the first request to all texts joined."""
    engine = SimulatedEngine(BackendConfig(engine="simulated", engine_options=engine_options(case)))
    engine.start()
    sink = _Collecting(case.num_streams)
    sampling = SamplingParams(max_tokens=case.num_tokens)
    requests = [
        GenerateRequest(request_id=str(number), prompt=PROMPT, sampling=sampling, max_tokens=case.num_tokens)
        for number in range(case.num_streams)
    ]
    begun = time.perf_counter()
    for request in requests:
        engine.submit(request, sink)
    sink.done.wait()
    num_chars = sum(len("".join(texts)) for texts in sink.texts.values())
    seconds = time.perf_counter() - begun
    engine.stop()
    if sink.error is not None:
        raise sink.error
    assert num_chars == sink.num_tokens * chars_per_token(ENGINE)
    results.send((sink.num_tokens / seconds, seconds))
