"""`check DIR`: find what can be checked in a folder, and report on all of it; of a pair of servers, on both."""

import json
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from deepseek_triton_build.build_errors import NothingToCheckError
from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import read_text, read_yaml
from deepseek_triton_build.check.finding import Report, find_code, in_order
from deepseek_triton_build.check.generated_origin import Stamp, changed_files, read_stamp
from deepseek_triton_build.check.model_identity import CheckOptions, require_options
from deepseek_triton_build.check.model_report import MODEL_PY, OUR_PACKAGE, check_model, is_of_vllm_backend
from deepseek_triton_build.check.pbtxt import NAME as CONFIG
from deepseek_triton_build.check.program_report import check_programs, is_program_folder
from deepseek_triton_build.check.rule_findings import ModelCheck
from deepseek_triton_build.check.schema import MODEL_YAML
from deepseek_triton_build.check.scripts import PROGRAM_SCRIPTS, START_SCRIPT, read_script
from deepseek_triton_build.check.shell_words import Word, base_name
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.render.stamp import MANIFEST
from deepseek_triton_build.rules import disaggregation_violations, orchestrator_violations
from deepseek_triton_build.rules.disaggregation import CONTEXT, GENERATION, ServerPair
from deepseek_triton_build.rules.orchestrator import CLUSTER, CONFIG_NAME, DEFAULT_TIMEOUT_S, SCRIPT_NAME, Orchestrator

SIDES = (CONTEXT, GENERATION)
_CONFIG = ("-c", "--config_file")
_START_TIMEOUT = ("-t", "--server_start_timeout")
_REQUEST_TIMEOUT = ("-r", "--request_timeout")
_METADATA = ("-m", "--metadata_server_config_file")
# Its backend, or a step of the ensemble around it.
_ENGINE_MODEL = re.compile(r'backend\s*:\s*"tensorrtllm"|name\s*:\s*"(preprocessing|postprocessing|tensorrt_llm_bls)"')
# The file of `build --format dynamo`, what tells such a file under another name, and a file in its ConfigMap.
_GRAPH = "dynamo.yaml"
_DEPLOYMENT = re.compile(r"^kind: DynamoGraphDeployment\b", re.MULTILINE)
_CARRIED = re.compile(r"^  (?P<name>[\w.-]+\.ya?ml): \|\n(?P<lines>(?:    .*\n|\n)+)", re.MULTILINE)
# The nodes of a worker, where it has several, and the GPUs of each.
_GPUS = re.compile(r'(?:nodeCount: (\d{1,6})(?:(?!gpu: "|nodeCount).)*)?gpu: "(\d{1,6})"', re.DOTALL)
_SECTIONS = (*(f"{side}_servers" for side in SIDES), CLUSTER)


class _Folder(NamedTuple):
    """Everything that was checked in one folder."""

    models: list[ModelCheck]
    unreadable: list[Finding]
    """Findings about folders that can't be looked into."""

    @property
    def findings(self) -> list[Finding]:
        return [*self.unreadable, *(finding for model in self.models for finding in model.findings)]

    @property
    def on_tensorrt_llm(self) -> ModelCheck | None:
        """The model that has a deployment of TensorRT-LLM."""
        return next((model for model in self.models if model.deployment is not None), None)


def check_repository(directory: Path, options: CheckOptions | None = None) -> Report:
    """Check what `directory` is: a model repository, a model's folder, what starts TensorRT-LLM's programs, or a pair.

    A program's is a YAML file of LLM arguments, a script, or a folder with such a file, scripts or both. A pair is the
    folder of context and generation servers, or the disagg_config.yaml that joins them.

    :raises NothingToCheckError: when it is none of these.
    :raises BuildError: when the options name an unknown release, variant or GPU, or a model_root that is no folder.
    """
    options = options or CheckOptions()
    require_options(options)
    _require_path(directory)
    graph = directory / _GRAPH if os.path.isdir(directory) else directory
    if _is_graph(graph):
        return _graph_report(graph, options)
    if _is_pair(directory):
        return _pair_report(directory, options)
    stamp, _ = read_stamp(directory, "")
    for side in SIDES:
        if any(name.startswith(f"{side}/") for name in stamp.files) and not os.path.lexists(directory / side):
            raise NothingToCheckError(
                f"{directory}: expected a pair's two sides, {' and '.join(SIDES)}, found no folder {side}; build the "
                "pair again, or name the folder of the other side"
            )
    if _is_orchestrators(directory):
        sides = SIDES if _is_pair(directory.parent) else ()
        pair = _server_pair({side: _checked(directory.parent / side, options) for side in sides})
        return Report(findings=in_order(_orchestrator_findings(directory, pair, options)), models=())
    checked = _checked(directory, options)
    return Report(findings=in_order(checked.findings), models=tuple(one.model for one in checked.models))


def _is_graph(path: Path) -> bool:
    """Whether the file is a deployment of Dynamo, under whatever name."""
    text = read_text(path, path.name) if os.path.isfile(path) else None
    return text is not None and (path.name == _GRAPH or bool(isinstance(text, str) and _DEPLOYMENT.search(text)))


def _graph_report(graph: Path, options: CheckOptions) -> Report:
    """Check the engine's files that a graph of Dynamo carries in its ConfigMaps, each as a YAML file by itself."""
    stamp, findings = read_stamp(graph.parent, "")
    findings += changed_files(stamp, graph.parent, graph.parent, "")
    models = []
    read = read_text(graph, graph.name)
    text = read if isinstance(read, str) else ""
    workers = [int(nodes or 1) * int(gpus) for nodes, gpus in _GPUS.findall(text)]
    for carried in _CARRIED.finditer(text):
        worker = text.count("kind: ConfigMap", 0, carried.start()) - 1  # their order is that of the workers
        own = {**stamp.values, "files": {}, "gpus": [*workers, None][min(worker, len(workers))]}
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, carried["name"])
            path.write_text(textwrap.dedent(carried["lines"]), encoding="utf-8")
            path.with_name(MANIFEST).write_text(json.dumps(own if stamp.values else {}), encoding="utf-8")
            checked = _checked(path, options)
        above = text.count("\n", 0, carried.start("lines"))
        findings += [replace(one, file=graph.name, line=one.line and one.line + above) for one in checked.findings]
        models += [replace(one.model, file=f"{graph.name} ({one.model.file})") for one in checked.models]
    findings += [read] if isinstance(read, Finding) else []
    return Report(findings=in_order(findings), models=tuple(models))


def _is_pair(directory: Path) -> bool:
    """Whether the folder holds the two sides of a pair, and not two models with these names."""
    sides = [directory / side for side in SIDES]
    return all(
        os.path.isdir(side) and os.access(side, os.R_OK) and not any(name.isdecimal() for name in os.listdir(side))
        for side in sides
    )


def _is_orchestrators(path: Path) -> bool:
    """Whether the file is a disagg_config.yaml, under whatever name."""
    if not os.path.isfile(path):
        return False
    document, _ = read_yaml(path, path.name)
    return path.name == CONFIG_NAME or (document is not None and any(key in document.values for key in _SECTIONS))


def _pair_report(directory: Path, options: CheckOptions) -> Report:
    sides = {side: _checked(directory / side, options) for side in SIDES}
    stamp, findings = read_stamp(directory, "")
    own = {name: checksum for name, checksum in stamp.files.items() if "/" not in name}  # the sides have stamps
    findings += changed_files(Stamp(values={**stamp.values, "files": own}, file=stamp.file), directory, directory, "")
    models = []
    for side, checked in sides.items():
        findings += [_below(side, finding) for finding in checked.findings]
        models += [replace(one.model, file=f"{side}/{one.model.file}") for one in checked.models]
    engines = dict.fromkeys(f"{one.engine} {one.release}" for one in models)
    if len({one.engine for one in models}) > 1:
        message = f"the two sides run different engines: {' and '.join(engines)}"
        fix = "build both sides anew with one build --profile disagg"
        findings.append(find_code("G014").finding(message, fix, file=models[-1].file))
    # What else is found of sides that were exchanged has the same cause.
    exchanged = _wrong_sides(sides)
    findings = [one for one in findings if not (exchanged and one.code == codes.CHANGED.code)] + exchanged
    pair = None if exchanged else _server_pair(sides)
    for rule, violation in () if pair is None else disaggregation_violations(pair):
        side, _, key = (violation.key or CONTEXT).partition(".")
        placed = sides[side].on_tensorrt_llm
        assert placed is not None  # or there would be no pair
        file, line, name = placed.place(key or None)
        finding = rule.finding(violation.message, violation.fix, file=file, line=line, key=name or None)
        findings.append(_below(side, finding))
    if os.path.lexists(directory / CONFIG_NAME):
        about = _orchestrator_findings(directory / CONFIG_NAME, pair, options)
        findings += [one for one in about if not (exchanged and one.code == "G034")]
    return Report(findings=in_order(findings), models=tuple(models))


def _wrong_sides(sides: Mapping[str, _Folder]) -> list[Finding]:
    """Return the finding about folders, or files in them, that are the other side's by their stamps."""
    checks = {side: checked.models[0] for side, checked in sides.items() if checked.models}
    wrong = [side for side, one in checks.items() if one.stamp.side not in (side, None)]
    pairs = zip(checks.values(), reversed(checks.values()), strict=True)
    is_whole = {one.stamp.side for one in checks.values()} == {*SIDES}
    if is_whole and not any(any(changed_files(other.stamp, one.folder, one.root, "")) for one, other in pairs):
        message = f"the {MANIFEST} of each side is about the files of the other"
        fix = f"exchange the two {MANIFEST}" if wrong else "exchange the other files of the two folders"
    elif wrong:
        message = " and ".join(f"{side}/ holds a {checks[side].stamp.side} server" for side in wrong)
        message += f", by its {MANIFEST}"
        fix = "exchange the names of the two folders" if is_whole else "build both sides anew with --profile disagg"
    else:
        return []
    side = wrong[0] if wrong else CONTEXT
    return [_below(side, codes.WRONG_SIDE.finding(message, fix, file=checks[side].stamp.file))]


def _below(side: str, finding: Finding) -> Finding:
    """Return the finding about a file of a side, named from the pair's folder."""
    return finding if os.path.isabs(finding.file) else replace(finding, file=f"{side}/{finding.file}")


def _server_pair(sides: Mapping[str, _Folder]) -> ServerPair | None:
    """Return the deployments of both sides; None where one is not known."""
    models = (checked.on_tensorrt_llm for checked in sides.values())
    known = [model.deployment for model in models if model is not None and model.deployment is not None]
    return ServerPair(context=known[0], generation=known[1]) if len(known) == len(SIDES) else None


def _orchestrator_findings(config: Path, pair: ServerPair | None, options: CheckOptions) -> list[Finding]:
    """Return what is wrong with a disagg_config.yaml and the script beside it that starts the orchestrator."""
    document, findings = read_yaml(config, config.name)
    path = config.parent / SCRIPT_NAME
    script, in_script = read_script(path, SCRIPT_NAME) if os.path.lexists(path) else (None, [])
    findings += in_script
    if document is None:
        return findings
    words = script.program.words if script is not None and script.program is not None else ()
    is_started = bool(words) and words[0].text == "disaggregated"
    release = None if pair is None else pair.context.release
    if options.release is not None:
        release = load_release(options.release)
    # Without the size of the weights nobody can say how long a load takes.
    is_known = pair is not None and all(d.checkpoint is not None for d in pair.sides.values())
    orchestrator = Orchestrator(
        config=document.values,
        release=release,
        start_timeout_s=_seconds(words, _START_TIMEOUT) if is_started else None,
        request_timeout_s=_seconds(words, _REQUEST_TIMEOUT) if is_started else None,
        has_metadata_server=any(word.text.partition("=")[0] in _METADATA for word in words),
        load_s=pair.load_limit_s if pair is not None and is_known else None,
        pair=None if pair is None else pair.well_typed(),
        ports=dict(_ports(config.parent)),
    )
    passed = _passed(words, _CONFIG) if is_started else None
    if passed is not None and base_name(passed.text) != config.name:
        message, fix = f"{SCRIPT_NAME} passes {passed.text} and not {config.name}", f'write -c "$here/{config.name}"'
        findings.append(codes.UNUSED_ARGUMENTS.finding(message, fix, file=SCRIPT_NAME))
    for rule, violation in orchestrator_violations(orchestrator):
        file, line = (SCRIPT_NAME, None) if violation.key is None else (config.name, document.line(violation.key))
        findings.append(rule.finding(violation.message, violation.fix, file=file, line=line, key=violation.key))
    return findings


def _passed(words: Sequence[Word], names: Sequence[str]) -> Word | None:
    """Return what a script gives a flag; None without the flag."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, equals, given = word.text.partition("=")
        if name in names:
            return replace(word, text=given) if equals else following
    return None


def _ports(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield each side of a pair with the port that its script gives the server."""
    for side in SIDES:
        path = directory / side / PROGRAM_SCRIPTS[0]
        script = read_script(path, path.name)[0] if os.path.isfile(path) else None
        passed = _passed(script.program.words, ("--port",)) if script is not None and script.program else None
        if passed is not None and passed.value is not None:
            yield side, passed.value


def _seconds(words: Sequence[Word], names: Sequence[str]) -> int | None:
    """Return the value of a flag, or trtllm-serve's default; None when it depends on more than the script."""
    passed = _passed(words, names)
    value = str(DEFAULT_TIMEOUT_S) if passed is None else passed.value
    return int(value) if value and value.isdecimal() else None


def _checked(directory: Path, options: CheckOptions) -> _Folder:
    """Check the models or programs of a folder, or a program's YAML file."""
    is_program = os.path.isfile(directory) or is_program_folder(directory)
    checked = check_programs(directory, options) if is_program else []
    models, unreadable = ([], []) if os.path.isfile(directory) else _models(directory, may_be_none=is_program)
    return _Folder(
        [*checked, *(check_model(folder, version, directory, options) for folder, version in models)], unreadable
    )


def _require_path(directory: Path) -> None:
    """:raises NothingToCheckError: when there is no such file or folder, or it can't be looked at."""
    try:
        os.stat(directory)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise NothingToCheckError(
            f"{directory}: expected a model repository, found nothing; name a folder that exists"
        ) from error
    except OSError as error:
        raise NothingToCheckError(f"{directory}: can't be read: {error.strerror}; make it readable") from error
    if directory.name in (START_SCRIPT, CONFIG) and os.path.isfile(directory):
        raise NothingToCheckError(f"{directory}: expected a folder, found a file of it; name its folder")


def _models(directory: Path, *, may_be_none: bool) -> tuple[list[tuple[Path, str]], list[Finding]]:
    """Return each model's folder with the name of its version folder, and findings about folders that can't be read.

    :raises NothingToCheckError: when there is no such folder, unless there may be none.
    """
    try:
        below = sorted(os.listdir(directory))
    except OSError as error:
        raise NothingToCheckError(f"{directory}: can't be read: {error.strerror}; make it readable") from error
    models: list[tuple[Path, str]] = []
    unreadable: list[Finding] = []
    for folder in (directory, *(directory / name for name in below)):
        try:
            names = sorted(name for name in os.listdir(folder) if name.isdecimal())
            models += [(folder, name) for name in names if _is_version(folder, folder / name)]
        except NotADirectoryError:
            continue
        except OSError as error:
            message, fix = f"{folder.name} can't be looked into: {error.strerror}", "make it readable and searchable"
            unreadable.append(codes.UNREADABLE.finding(message, fix, file=folder.name))
    if may_be_none:
        return models, unreadable
    if not models and unreadable:
        raise NothingToCheckError(f"{directory}: {unreadable[0].message}; {unreadable[0].fix}")
    if not models and (of_engines := _of_trt_engines(directory)):
        raise NothingToCheckError(
            f"{directory}: expected a model with <version>/{MODEL_YAML}, found one of the TensorRT-engine backend "
            f"(ensemble, preprocessing, tensorrtllm) in {of_engines}: it loads compiled engines, and DeepSeek runs on "
            "PyTorch, without an ensemble; write its repository with deepseek-triton build"
        )
    if not models:
        raise NothingToCheckError(
            f"{directory}: expected a model (a folder with <version>/{MODEL_YAML}), found none; name a model "
            "repository, a model's folder or a YAML file of LLM arguments"
        )
    return models, unreadable


def _of_trt_engines(directory: Path) -> str | None:
    """Return the file by which a model repository is one of Triton's tensorrtllm backend; None for another."""
    for config in sorted((*directory.glob(CONFIG), *directory.glob(f"*/{CONFIG}"))):
        text = read_text(config, CONFIG)
        if isinstance(text, str) and _ENGINE_MODEL.search(text):
            return str(config.relative_to(directory))
    return None


def _is_version(folder: Path, version_dir: Path) -> bool:
    """Whether the version folder has a model.yaml, or has lost one: it is ours, or may not be looked into."""
    if os.path.lexists(version_dir / MODEL_YAML) or is_of_vllm_backend(folder, version_dir):
        return True
    if os.path.isdir(version_dir) and not os.access(version_dir, os.X_OK):
        return True
    is_ours = os.path.exists(folder / MANIFEST) or os.path.isdir(version_dir / OUR_PACKAGE)
    return is_ours and os.path.exists(version_dir / MODEL_PY)
