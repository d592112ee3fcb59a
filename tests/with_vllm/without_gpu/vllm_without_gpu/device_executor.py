"""What both executors have in common: vLLM's `Executor`, on a device that is only pretended."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from vllm_without_gpu.executor_options import ExecutorOptions
from vllm_without_gpu.made_tokens import MadeTokens, runner_output


class DeviceExecutor(Executor):
    """One iteration at a time, in the engine core's own process and thread.

    An iteration is two calls: vLLM hands over the requests, computes the bitmasks of their grammars, and has the tokens
    chosen.
    """

    def _init_executor(self) -> None:
        self._options = ExecutorOptions.of(self.vllm_config.additional_config or {})
        self._num_iterations = 0
        self._scheduled: SchedulerOutput
        self.load()

    @abstractmethod
    def load(self) -> None:
        """Make ready what generates."""

    @abstractmethod
    def generate(self, scheduled: SchedulerOutput, grammar: GrammarOutput | None) -> Mapping[str, MadeTokens]:
        """Return what an iteration makes, by the ids of the scheduled requests."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self._scheduled = scheduler_output
        return _answered(None, non_block)

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        began_s = time.monotonic()
        output: ModelRunnerOutput = runner_output(self.generate(self._scheduled, grammar_output))
        if self._scheduled.total_num_scheduled_tokens:
            self._num_iterations += 1
            if self._options.fail_after is not None and self._num_iterations > self._options.fail_after:
                raise RuntimeError(f"the device has failed, as fail_after: {self._options.fail_after} says")
            time.sleep(max(0.0, self._options.step_s - (time.monotonic() - began_s)))
        return _answered(output, non_block)

    def execute_dummy_batch(self) -> None:
        """Take part in the iteration of another rank of data parallelism."""
        time.sleep(self._options.step_s)

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        """Answer what vLLM asks its workers, in the name of the only one."""
        answers: dict[str, Any] = {
            "get_kv_cache_spec": self._kv_cache_spec,
            "determine_available_memory": lambda: self._options.kv_bytes,
            "get_supported_kv_cache_layouts": lambda: ["LBNHC"],
            "get_supported_tasks": lambda: ("generate",),
            "initialize_from_config": lambda: None,
            "reset_mm_cache": lambda: None,
            "set_kv_cache_layout": lambda: None,
        }
        if method == "compile_or_warm_up_model":
            return []  # seconds of each worker that compiles
        return _answered([answers[method]()], non_block)

    def _kv_cache_spec(self) -> dict[str, MLAAttentionSpec]:
        config = self.model_config.hf_text_config
        spec = MLAAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=config.kv_lora_rank + config.qk_rope_head_dim,
            dtype=torch.bfloat16,
        )
        return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(config.num_hidden_layers)}

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


def _answered(value: Any, non_block: bool) -> Any:
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future
