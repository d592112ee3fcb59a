"""Cuts a checkpoint to its first layers, and to its first experts, for tests of hardware and settings.

The tensors that are left keep their shapes, types and bytes. Only a few rows of one are in memory at once.
"""

import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import INDEX, is_v4, read_json_object
from deepseek_triton_build.text import first_names
from deepseek_triton_tools.checkpoints import folder_files
from deepseek_triton_tools.checkpoints.shard_writer import OutputTensor, ShardWriter, dealt, file_size
from deepseek_triton_tools.checkpoints.stored_tensors import StoredTensor, StoredTensors, config_number, in_order
from deepseek_triton_tools.host.processes import is_running
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.repository import checkpoint_manifest
from deepseek_triton_tools.tool_errors import ToolError

SHARD_BYTES = 4_300_000_000
"""Size of a file, as DeepSeek publishes them."""
_QUANT_DOCUMENTS = (folder_files.HF_QUANT_CONFIG, folder_files.QUANT_CFG)
"""Files that name layers."""
_LAYER = re.compile(r"(?<![\w.])((?:model\.)?layers\.)(\d{1,9})(?!\d)")
_EXPERT = re.compile(r"\.(?:mlp|ffn)\.experts\.(\d{1,9})\.")
_PER_EXPERT = re.compile(r"\.mlp\.gate\.(?:weight|e_score_correction_bias)$")
"""Tensors with a row for each expert."""


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """The user's wishes."""

    num_layers: int
    num_experts: int | None = None
    """Routed experts of each layer; None: all."""
    keep_mtp: bool = False
    """True keeps the MTP layer, as the layer after the last one."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class CutTensor:
    """A tensor that is left, or the first rows of one."""

    source: StoredTensor
    output: OutputTensor


@dataclass(frozen=True)
class Cut:
    """Everything that is written."""

    source: Path
    shards: Mapping[str, Sequence[CutTensor]]
    """Name of a file -> its tensors, in their order."""
    documents: Mapping[str, Any]
    """Name of a JSON file -> its content."""
    num_moe_layers: int
    """Layers with routed experts, the MTP layer not counted."""

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return sum(file_size([tensor.output for tensor in shard]) for shard in self.shards.values())


def plan_cut(source: StoredTensors, config: Mapping[str, Any], options: CutOptions) -> Cut:
    """Plan it. `config` is the content of config.json.

    :raises ToolError: with everything that keeps the checkpoint from being cut so.
    """
    if "text_config" in config:
        raise ToolError(f"{source.folder}: expected any DeepSeek up to V4, found V4.1, which is not cut", exit_code=2)
    whole = config_number(config, "num_hidden_layers")
    num_dense = config_number(config, "first_k_dense_replace", 0)
    problems = [*_wrong_layers(source, config, options), *_wrong_experts(source, config, options)]
    if problems:
        raise ToolError(f"{source.folder}: {'; '.join(problems)}", exit_code=2)
    tensors = sorted(_left(source, whole, options), key=lambda tensor: in_order(tensor.output.name))
    shards = dealt(tensors, lambda tensor: [tensor.output], options.shard_bytes)
    weight_map = {tensor.output.name: name for name, shard in shards.items() for tensor in shard}
    total = sum(tensor.output.num_bytes for tensor in tensors)
    documents = {
        INDEX: {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        folder_files.CONFIG: _cut_config(config, whole, options),
    }
    for name in _QUANT_DOCUMENTS:
        if (source.folder / name).is_file():
            documents[name] = _relayered(read_json_object(source.folder / name), whole, options)
    return Cut(source.folder, shards, documents, max(0, options.num_layers - num_dense))


def write_cut(
    cut: Cut, output: Path, *, on_progress: Callable[[int], None], should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Write the cut checkpoint. Return False where `should_stop` ended it early, which leaves nothing.

    :param on_progress: called with the bytes that are written so far.
    :raises ToolError: when `output` is there already, has no room, or can't be written.
    """
    # The name "." is none that a folder beside it could be made of.
    output = output.absolute()
    _check_output(cut, output)
    mine = f".{output.name}.{platform.node()}-"
    scratch = output.with_name(f"{mine}{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(output.parent, mine)
        scratch.mkdir()
        files = _write_shards(cut, scratch, on_progress, should_stop)
        if files is None:
            return False
        for path in folder_files.companion_files(cut.source):
            shutil.copyfile(path, scratch / path.name)
            files[path.name] = checkpoint_manifest.record_of(scratch / path.name)
        for name, document in cut.documents.items():
            (scratch / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            files[name] = checkpoint_manifest.record_of(scratch / name)
        checkpoint_manifest.write_manifest(
            scratch,
            checkpoint_manifest.CheckpointManifest(f"{checkpoint_manifest.source_of(cut.source)}, cut", "", files),
        )
        os.rename(scratch, output)
    except OSError as error:
        raise ToolError(f"{output} can't be written: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove the folders of cuts on this machine that were killed. Their names end with the number of the process."""
    for path in list(folder.iterdir()):
        process = path.name.removeprefix(prefix)
        # A folder with this process' own number is of a process that is no more.
        is_own = process == str(os.getpid())
        if path.name.startswith(prefix) and process.isdecimal() and (is_own or not is_running(int(process))):
            shutil.rmtree(path)


def _write_shards(
    cut: Cut, folder: Path, on_progress: Callable[[int], None], should_stop: Callable[[], bool]
) -> dict[str, checkpoint_manifest.FileRecord] | None:
    """Return the records of the files; None where it was stopped."""
    written, records = 0, {}
    for name, shard in cut.shards.items():
        with ShardWriter(folder / name, [tensor.output for tensor in shard]) as writer:
            for tensor in shard:
                for rows in tensor.source.pieces(tensor.output.shape[0] if tensor.output.shape else None):
                    if should_stop():
                        return None
                    writer.write(rows)
                    written += rows.nbytes
                    on_progress(written)
            records[name] = checkpoint_manifest.FileRecord(writer.size, writer.finish())
    return records


def _left(source: StoredTensors, whole: int, options: CutOptions) -> Iterator[CutTensor]:
    for name, tensor in source.items():
        new = _relayered_name(name, whole, options)
        expert = _EXPERT.search(name)
        is_dropped = expert is not None and options.num_experts is not None and int(expert[1]) >= options.num_experts
        if new is None or is_dropped:
            continue
        shape = tensor.shape
        if options.num_experts is not None and _PER_EXPERT.search(name):
            shape = (options.num_experts, *shape[1:])
        yield CutTensor(tensor, OutputTensor(new, tensor.dtype, shape))


def _relayered_name(name: str, whole: int, options: CutOptions) -> str | None:
    """Return the name that a tensor or module has in the cut checkpoint; None when it is not in it."""
    if name.startswith("mtp.") and not options.keep_mtp:
        return None
    if (match := _LAYER.search(name)) is None:
        return name
    layer = int(match[2])
    if layer < options.num_layers:
        return name
    if layer < whole or not options.keep_mtp:
        return None
    return f"{name[: match.start(2)]}{options.num_layers + layer - whole}{name[match.end(2) :]}"


def _relayered(value: Any, whole: int, options: CutOptions) -> Any:
    """Return a JSON document without the names of layers that are left out, in its keys and lists."""
    if isinstance(value, dict):
        named = ((_relayered_name(key, whole, options), below) for key, below in value.items())
        return {key: _relayered(below, whole, options) for key, below in named if key is not None}
    if isinstance(value, list):
        names = (_relayered_name(item, whole, options) if isinstance(item, str) else item for item in value)
        return [_relayered(name, whole, options) for name in names if name is not None]
    return value


def _cut_config(config: Mapping[str, Any], whole: int, options: CutOptions) -> dict[str, Any]:
    new: dict[str, Any] = _relayered(dict(config), whole, options)
    new["num_hidden_layers"] = options.num_layers
    if new.get("first_k_dense_replace") is not None:
        new["first_k_dense_replace"] = min(new["first_k_dense_replace"], options.num_layers)
    if options.num_experts is not None:
        new["n_routed_experts"] = options.num_experts
    if isinstance(ratios := config.get("compress_ratios"), list):
        new["compress_ratios"] = [*ratios[: options.num_layers], *ratios[whole:]]
    if number := _num_read_by_dspark(config):
        new["dspark_target_layer_ids"] = list(range(options.num_layers - number, options.num_layers))
    if not options.keep_mtp:
        new = {key: value for key, value in new.items() if not key.startswith("dspark_")}
        new["num_nextn_predict_layers"] = 0
    return new


def _num_read_by_dspark(config: Mapping[str, Any]) -> int:
    """Return how many layers, the last ones, DSpark reads."""
    read = config.get("dspark_target_layer_ids")
    return len(read) if isinstance(read, list) else 0


def _wrong_layers(source: StoredTensors, config: Mapping[str, Any], options: CutOptions) -> Iterator[str]:
    whole = config_number(config, "num_hidden_layers")
    stored = {in_order(name)[0] for name in source}
    if not 0 < options.num_layers <= whole:
        yield f"--layers: expected 1 to {whole}, found {options.num_layers}"
    elif (
        options.num_layers == whole
        and options.num_experts is None
        and (options.keep_mtp or max(stored, default=-1) < whole)
    ):
        yield f"--layers {whole}: expected fewer than all layers, or --experts"
    kept = range(min(options.num_layers, whole))
    if num_missing := len(kept) - sum(layer in kept for layer in stored):
        first = next(layer for layer in kept if layer not in stored)
        more = f" and {num_missing - 1:,} more" if num_missing > 1 else ""
        yield f"expected the tensors of its {whole} layers, found none of layer {first}{more}; download it again"
    if options.keep_mtp and max(stored, default=-1) < whole:
        yield "--mtp: expected an MTP layer, found none; leave --mtp out"
    least = _num_read_by_dspark(config)
    if options.keep_mtp and options.num_layers < least:
        yield f"--mtp: expected --layers of at least {least}, which DSpark reads, found {options.num_layers}"


def _wrong_experts(source: StoredTensors, config: Mapping[str, Any], options: CutOptions) -> Iterator[str]:
    number = options.num_experts
    if number is None:
        return
    if is_v4(config):
        yield "--experts: expected a model before V4, whose tables (tid2eid) name all experts; leave --experts out"
        return
    if config.get("n_routed_experts") is None:
        yield "--experts: expected n_routed_experts in config.json, found none; leave --experts out"
        return
    whole = config_number(config, "n_routed_experts")
    groups, chosen, top = (
        config_number(config, key, 1) or 1 for key in ("n_group", "topk_group", "num_experts_per_tok")
    )
    # A group's score is the sum of its two best experts, so that it needs two where groups are chosen.
    least = max(-(-top // chosen), 1 if groups == chosen else 2)
    if number > whole or number % groups or number // groups < least:
        more = groups * max(least, number // groups + 1)
        yield (
            f"--experts: expected equal groups ({groups}), of which {chosen} hold the {top} experts of a token, found "
            f"{number} of {whole} experts; use {min(more, whole)}"
        )
    routers = [name for name, tensor in source.items() if _PER_EXPERT.search(name) and tensor.shape[:1] != (whole,)]
    if routers:
        yield f"--experts: expected {whole} rows in each router by config.json, found others: {first_names(routers)}"


def _check_output(cut: Cut, output: Path) -> None:
    if output.exists() and output.samefile(Path.cwd()):
        raise ToolError(f"{output}: expected another folder than the one it runs in; name another one")
    if output.resolve().is_relative_to(cut.source.resolve()):
        raise ToolError(f"{output}: expected a folder outside the checkpoint's; name another one")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ToolError(f"{output}: expected no such folder, or an empty one, found something; name another one")
    free = folder_files.free_bytes(output)
    if cut.size > free:
        raise ToolError(f"{output}: expected room for {sized(cut.size)}, found {sized(free)}; name another disk")
