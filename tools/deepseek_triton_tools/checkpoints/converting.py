"""Runs a conversion: processes that write one file after the other, and the documents last.

It may be killed at any moment. A file gets its name only when it is whole, and config.json comes last, so a folder that
an engine would load is complete. The folder `.conversion` holds what was planned and the checksum of each file that is
done; the next run of the same conversion goes on there. Whoever writes a file writes the same bytes, so that runs that
overlap do no harm; locks only keep work from being done twice, and are left out where the file system has none.
"""

import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from deepseek_triton_build.check import INDEX
from deepseek_triton_tools.checkpoints import number_formats
from deepseek_triton_tools.checkpoints.conversion_plan import INPUT_SCALES_FILE, ConversionPlan, OutputShard, TensorJob
from deepseek_triton_tools.checkpoints.folder_files import CONFIG, CONVERSION, companion_files, free_bytes
from deepseek_triton_tools.checkpoints.shard_writer import OutputTensor, ShardWriter
from deepseek_triton_tools.checkpoints.stored_tensors import Array
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.host.whole_file import sweep, whole_file
from deepseek_triton_tools.repository import checkpoint_manifest
from deepseek_triton_tools.tool_errors import CheckpointError

_PLAN = "plan.json"
_ROOM = 2**30
"""Bytes that stay free beside the output."""
# Rows that are computed at once. Larger pieces do not stay in a processor's cache.
_ROWS = 2 * number_formats.BLOCK
_TURN_S = 0.2
"""The longest time from one report of progress to the next."""
Say = Callable[[int], object]
"""Reports bytes that were read, and ends its process when the main one was killed."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConversionProgress:
    """How far the conversion is. All sizes are in bytes of the checkpoint that is read."""

    num_files_done: int
    num_files: int
    done: int
    """With what earlier runs did."""
    total: int
    new: int
    """Without what earlier runs did."""


@dataclass(frozen=True, kw_only=True)
class ConversionRun:
    """How the conversion runs. None of it changes a byte of the output."""

    workers: int
    share: tuple[int, int] = (1, 1)
    """(number, of how many): the share of the files that this run writes, for several machines."""


def convert(
    plan: ConversionPlan,
    output: Path,
    options: ConversionRun,
    *,
    on_progress: Callable[[ConversionProgress], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Write the new checkpoint, or this run's share of it. Return whether it is complete.

    `on_progress` is called several times a second. Where `should_stop` says so, it ends early with False.

    :raises CheckpointError: when the output holds something else, another process works on the same share, there is no
        room, or the checkpoint can't be read.
    """
    if _is_complete(plan, output):
        return True
    number, of = options.share
    mine = [shard for index, shard in enumerate(plan.shards) if index % of == number - 1]
    missing = [shard for shard in mine if _record(output, shard) is None]
    needed = sum(shard.size for shard in missing)
    free = free_bytes(output)
    if missing and needed + _ROOM > free:
        raise CheckpointError(
            f"{output}: expected room for {sized(needed)} and {sized(_ROOM)} beside it, found {sized(free)}; make "
            "room, or name a folder on another disk"
        )
    with _only_one(output / CONVERSION / f"share-{number}-of-{of}.lock", output):
        sweep(output)
        _write_json(output / CONVERSION / _PLAN, _identity(plan))
        _write_missing(mine, missing, output, options, on_progress, should_stop)
        records = {shard.name: record for shard in plan.shards if (record := _record(output, shard))}
        if len(records) < len(plan.shards):
            # Another share may have ended and tidied up just now.
            return _is_complete(plan, output)
        _finish(plan, output, records)
    return True


def _write_missing(
    mine: Sequence[OutputShard],
    missing: Sequence[OutputShard],
    output: Path,
    options: ConversionRun,
    on_progress: Callable[[ConversionProgress], None],
    should_stop: Callable[[], bool],
) -> None:
    """Write the missing ones of this run's files, each of which one process writes."""
    writers = [partial(_write_shard, output)] * options.workers
    total = sum(shard.source_bytes for shard in mine)
    before = total - sum(shard.source_bytes for shard in missing)
    num_done, new = len(mine) - len(missing), 0
    try:
        with closing(_in_processes(missing, writers)) as turns:
            for num_bytes, num_files in turns:
                new += num_bytes
                num_done += num_files
                on_progress(ConversionProgress(num_done, len(mine), before + new, total, new))
                if should_stop():
                    break
    finally:
        sweep(output)


def _in_processes(
    shards: Sequence[OutputShard], writers: Sequence[Callable[[OutputShard, Say], None]]
) -> Generator[tuple[int, int], None, None]:
    """Write the files in one process for each of `writers`; each gets the next file when it has none.

    Yield, several times a second, the bytes that were read and the files that were done since the last time. Close the
    generator to end the processes early. Ctrl-C reaches the main process only.

    :raises CheckpointError: when a process was killed, or what a process raised.
    """
    # A forked process could not use CUDA, and would inherit locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    left = iter(shards)
    busy: dict[Connection, SpawnProcess] = {}
    try:
        for writer, shard in zip(writers, left, strict=False):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, writer), daemon=True)
            # Also while it imports.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            busy[ours] = process
            ours.send(shard)
        while busy:
            num_bytes = num_files = 0
            for pipe in wait(list(busy), _TURN_S):
                assert isinstance(pipe, Connection)
                word = pipe.recv()
                if isinstance(word, Exception):
                    raise word
                if word is not None:
                    num_bytes += word
                    continue
                num_files += 1
                if (following := next(left, None)) is not None:
                    pipe.send(following)
                else:
                    pipe.close()
                    busy.pop(pipe).join()
            yield num_bytes, num_files
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        # A process lives until its pipe is closed, so one that does not answer was killed. Other errors of the system
        # have other causes: too few descriptors for a pipe, or no process to be had.
        raise CheckpointError(
            "a process that converts was killed; was memory short? Run the same command again to go on, perhaps with "
            "fewer --workers"
        ) from error
    finally:
        for pipe, process in busy.items():
            process.terminate()
            process.join()
            pipe.close()


def _work(pipe: Connection, write: Callable[[OutputShard, Say], None]) -> None:
    """Write the files that come through `pipe`, until its other end is closed."""
    # A main process that was killed reads no more, so the next word to it ends this process.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            shard = pipe.recv()
            try:
                write(shard, pipe.send)
            except CheckpointError as error:
                pipe.send(error)
            else:
                pipe.send(None)


def _write_shard(output: Path, shard: OutputShard, say: Say) -> None:
    """Write a file, and say the bytes that have been read of the checkpoint."""
    try:
        with ShardWriter(output / shard.name, shard.outputs) as writer:
            for job in shard.jobs:
                for values, num_read in run_job(job):
                    writer.write(values)
                    say(num_read)
            record = checkpoint_manifest.FileRecord(writer.size, writer.finish())
            _write_json(output / CONVERSION / f"{shard.name}.json", asdict(record))
    except (CheckpointError, BrokenPipeError, ConnectionResetError):
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or output}: {error.strerror}") from error
    except Exception as error:
        raise CheckpointError(f"{output}: {type(error).__name__}: {error}") from error


def _record(output: Path, shard: OutputShard) -> checkpoint_manifest.FileRecord | None:
    """The record of a file that is done; None of one that is not."""
    try:
        record = json.loads((output / CONVERSION / f"{shard.name}.json").read_text(encoding="utf-8"))
        if (output / shard.name).stat().st_size != shard.size:
            return None
    except FileNotFoundError:
        return None
    return checkpoint_manifest.FileRecord(**record)


def _is_complete(plan: ConversionPlan, output: Path) -> bool:
    """Whether an earlier run has made this checkpoint already.

    :raises CheckpointError: when the folder holds what another conversion or something else wrote.
    """
    if output.resolve().is_relative_to(plan.source.resolve()):
        raise CheckpointError(f"{output}: expected a folder for the output outside the checkpoint's")
    if not output.exists():
        return False
    if not output.is_dir():
        raise CheckpointError(f"{output}: expected a folder for the output, found a file")
    if not (output / CONVERSION).is_dir():
        if any(output.iterdir()):
            raise CheckpointError(f"{output}: expected an empty folder, or one of a conversion that was stopped")
        return False
    # A run that was stopped early has no plan yet.
    with suppress(FileNotFoundError):
        begun = json.loads((output / CONVERSION / _PLAN).read_text(encoding="utf-8"))
        if begun != _identity(plan):
            raise CheckpointError(
                f"{output}: another conversion was begun here ({begun.get('source')} to {begun.get('target')}, or with "
                "other options, or the checkpoint has changed); name another folder, or remove this one"
            )
    return (output / CONFIG).exists()


def _identity(plan: ConversionPlan) -> dict[str, str]:
    """Return what has to be equal for a run to go on where another was stopped.

    The digest is of all that decides the output's bytes: each tensor's place in the checkpoint and in the output, the
    documents, and the size and time of the checkpoint's files, because other weights may have the same shapes.
    """
    digest = hashlib.sha256()
    jobs = [(shard, job) for shard in plan.shards for job in shard.jobs]
    for path in sorted({tensor.file for _, job in jobs for tensor in job.weight.tensors}):
        status = path.stat()
        digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    for shard, job in jobs:
        places = [
            (tensor.name, tensor.dtype, tensor.shape, tensor.file.name, tensor.begin) for tensor in job.weight.tensors
        ]
        digest.update(repr((shard.name, job.written_as, places)).encode())
    digest.update(json.dumps([plan.documents, plan.input_scales], sort_keys=True).encode())
    return {"source": str(plan.source.resolve()), "target": plan.target, "digest": digest.hexdigest()}


@contextmanager
def _only_one(lock: Path, output: Path) -> Iterator[None]:
    """:raises CheckpointError: while another process holds the lock."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{output}: another process converts into this folder; wait for it") from error
        except OSError:
            # Some network file systems have no locks; what overlapping runs write is the same.
            _log.debug("%s: the file system has no locks", lock)
        yield
    finally:
        os.close(descriptor)


def _finish(plan: ConversionPlan, output: Path, shards: Mapping[str, checkpoint_manifest.FileRecord]) -> None:
    """Write what belongs to the weights: its other files, the index, the manifest, and config.json last."""
    files = dict(shards)
    if plan.input_scales:
        tensors = [OutputTensor(name, "F32", (1,)) for name in plan.input_scales]
        with ShardWriter(output / INPUT_SCALES_FILE, tensors) as writer:
            writer.write(np.array([*plan.input_scales.values()], "<f4"))
            files[INPUT_SCALES_FILE] = checkpoint_manifest.FileRecord(writer.size, writer.finish())
    total = sum(tensor.num_bytes for shard in plan.shards for tensor in shard.outputs) + 4 * len(plan.input_scales)
    index = {"metadata": {"total_size": total}, "weight_map": plan.weight_map}
    # Another share may end at the same time.
    with TemporaryDirectory(dir=output / CONVERSION) as name:
        scratch = Path(name)
        for path in companion_files(plan.source):
            shutil.copyfile(path, scratch / path.name)
            files[path.name] = _moved(scratch / path.name, output)
        for document in (INDEX, *plan.documents):
            _write_json(scratch / document, index if document == INDEX else plan.documents[document])
            if document != CONFIG:
                files[document] = _moved(scratch / document, output)
        files[CONFIG] = checkpoint_manifest.record_of(scratch / CONFIG)
        made_of = f"{checkpoint_manifest.source_of(plan.source)}, converted to {plan.target}"
        checkpoint_manifest.write_manifest(output, checkpoint_manifest.CheckpointManifest(made_of, "", files))
        _moved(scratch / CONFIG, output)
    sweep(output)
    for path in (output / CONVERSION).iterdir():
        if path.is_file() and path.name != _PLAN:
            path.unlink(missing_ok=True)


def update_manifest(folder: Path, name: str) -> None:
    """Have the folder's manifest, where it has one, expect the file `name` as it is now."""
    if (manifest := checkpoint_manifest.read_manifest(folder)) is not None:
        checkpoint_manifest.write_manifest(
            folder, replace(manifest, files={**manifest.files, name: checkpoint_manifest.record_of(folder / name)})
        )


def _moved(path: Path, folder: Path) -> checkpoint_manifest.FileRecord:
    """Give a file that is whole its place, where it appears at once."""
    record = checkpoint_manifest.record_of(path)
    os.replace(path, folder / path.name)
    return record


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    with whole_file(path) as file:
        json.dump(document, file, indent=2)
        file.write("\n")


def run_job(job: TensorJob) -> Iterator[tuple[Array, int]]:
    """Yield the values of the job's outputs in their order, and the bytes of the checkpoint that were read for them.

    :raises CheckpointError: when the checkpoint can't be read, or holds what is no number.
    """
    weight, stored_tensor = job.weight, job.weight.stored
    if not stored_tensor.num_bytes:
        return
    if weight.format == job.written_as:
        for tensor in weight.tensors:
            yield from ((rows, rows.nbytes) for rows in tensor.pieces())
        return
    scales_of_rows = []
    for begin in range(0, stored_tensor.shape[0], _ROWS):
        end = min(begin + _ROWS, stored_tensor.shape[0])
        stored, scales = stored_tensor.read(begin, end), weight.read_scales(begin, end)
        values, new_scales = _converted(job, stored, scales)
        # What becomes of a whole group of INT4 shows in its new scale.
        are_finite = all(np.isfinite(each).all() for each in (scales, new_scales) if each is not None)
        if not are_finite or (weight.format == "fp8" and (stored.view(np.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointError(
                f"{stored_tensor.file}: {job.name}: expected numbers, found an infinite one or NaN; verify the "
                "checkpoint, and download the file again"
            )
        yield values, stored.nbytes + (0 if scales is None else scales.nbytes)
        if new_scales is not None:
            scales_of_rows.append(new_scales)
    if scales_of_rows:
        yield np.concatenate(scales_of_rows), 0


def _converted(
    job: TensorJob, stored: Array, scales: number_formats.Floats | None
) -> tuple[Array, number_formats.Floats | None]:
    """Return rows of the new tensor, and their scales where it has such."""
    if job.weight.format == "fp8" and scales is not None:
        if job.written_as == "int4":
            return number_formats.int4_of_fp8(stored, scales)
        return number_formats.bfloat16_of(number_formats.dequantize_blocks(stored, scales)), None
    weight = number_formats.float32_of(stored) if scales is None else number_formats.dequantize_groups(stored, scales)
    if job.written_as == "int4":
        return number_formats.quantize_int4(weight)
    if job.written_as == "fp8":
        return number_formats.quantize_blocks(weight)
    return number_formats.bfloat16_of(weight), None
