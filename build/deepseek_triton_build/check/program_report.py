"""All checks of arguments outside a model repository: a YAML file, the flags of the script beside it, or both."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes, scripts
from deepseek_triton_build.check.checkpoint_files import CheckpointFacts
from deepseek_triton_build.check.documents import Document, read_written_yaml, read_yaml
from deepseek_triton_build.check.engine_arguments import engine_problems
from deepseek_triton_build.check.flags import (
    YAML_FLAGS,
    ProgramFlags,
    add_config,
    as_flag,
    flag_keys,
    read_flags,
    read_vllm_flags,
    unused_flags,
)
from deepseek_triton_build.check.generated_origin import Recorded, changed_files, read_recorded
from deepseek_triton_build.check.gpus import (
    TRTLLM_RANKS,
    VLLM_RANKS,
    Server,
    are_left_to_slurm,
    count_findings,
    hidden_gpus,
    memory_problems,
    repeated_servers,
    shared_gpus,
    started_ranks,
    visible_gpus,
)
from deepseek_triton_build.check.model_identity import (
    CheckOptions,
    find_checkpoint_folder,
    find_release,
    find_vllm,
    release_of_image,
    vllm_of_image,
)
from deepseek_triton_build.check.rule_findings import ModelCheck, Place, canonical_settings, place_in
from deepseek_triton_build.check.schema import (
    MODEL_YAML,
    TRITON_SECTION,
    UPSTREAM_KEYS,
    CheckedArguments,
    check_schema,
    triton_settings,
)
from deepseek_triton_build.check.shell_syntax import UNKNOWN, UNSEEN
from deepseek_triton_build.check.shell_words import Word, Written, base_name
from deepseek_triton_build.check.start_script import lost_exports
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.finding import Code
from deepseek_triton_build.data.releases import Release, load_release
from deepseek_triton_build.data.spelling import flattened
from deepseek_triton_build.render.stamp import RELEASE_RECORD
from deepseek_triton_build.render.trtllm_commands import YAML_NAME
from deepseek_triton_build.rules.orchestrator import SCRIPT_NAME
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE, Deployment, Violation, VllmDeployment
from deepseek_triton_build.text import first_names

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_YAML_NAME = re.compile(r"[\w.-]+\.ya?ml\b")
_ASCII_UNKNOWN = ascii(UNKNOWN)[1:-1]
# What a script finds its own folder with.
_OWN_FOLDER = re.compile(r"BASH_SOURCE|dirname|\$0|\bpwd\b|\$PWD|SLURM_SUBMIT_DIR")
# Commands behind which a path is that of another machine, or of a container.
_ELSEWHERE = frozenset({"ssh", "docker", "podman", "nerdctl", "kubectl", "enroot", "apptainer", "singularity"})
# What else divides the weights. Where a script leaves all of it open, nothing is known about their memory.
_DIVIDING = ("pipeline_parallel_size", "enable_attention_dp")
# The arguments that TensorRT-LLM's programs have by themselves.
_PROGRAM: Mapping[str, Any] = {"backend": "pytorch"}


def is_program_folder(folder: Path) -> bool:
    """Whether `folder` holds what TensorRT-LLM's or vLLM's own programs are started with."""
    return os.path.isfile(folder / YAML_NAME) or bool(_script_names(folder))


def is_script(path: Path) -> bool:
    """Whether a file is meant for a shell."""
    return path.suffix in scripts.SCRIPT_SUFFIXES and os.path.isfile(path)


def _script_names(folder: Path) -> list[str]:
    """Return the scripts of a folder that start a program: those with the names that `build` gives, and others."""
    try:
        names = sorted(name for name in os.listdir(folder) if is_script(folder / name))
    except OSError:
        return []
    named = [name for name in scripts.PROGRAM_SCRIPTS if name in names]
    others = [name for name in names if name not in (*scripts.PROGRAM_SCRIPTS, scripts.START_SCRIPT, SCRIPT_NAME)]
    return named + [name for name in others if _starts_engine(scripts.read_script(folder / name, name)[0])]


def _starts_engine(script: scripts.ShellScript | None) -> bool:
    return script is not None and any(program.is_engine for program in script.programs)


def check_programs(path: Path, options: CheckOptions) -> list[ModelCheck]:
    """Check a folder of one of TensorRT-LLM's or vLLM's programs, a script, or a YAML file of LLM arguments with the
    scripts beside it."""
    folder = path if os.path.isdir(path) else path.parent
    yaml = path if path not in (folder, *([path] if is_script(path) else [])) else folder / YAML_NAME
    names = [path.name] if is_script(path) else [] if yaml.name == MODEL_YAML else _script_names(folder)
    read = {name: scripts.read_script(folder / name, name) for name in names}
    if is_script(path) and not _starts_engine(read[path.name][0]):
        beside = {name: scripts.read_script(folder / name, name) for name in _script_names(folder)}
        read = {name: one for name, one in beside.items() if one[0] and path.name in one[0].callers} or read
    if yaml == path:  # only the scripts that pass the file say something about it
        read = {name: one for name, one in read.items() if one[0] is not None and _passes(one[0], yaml.name)}
    checked: list[_ProgramCheck] = []
    for name, (script, findings) in read.items():
        started = [] if script is None else script.programs
        engines: list[scripts.Program | None] = [program for program in started if program.is_engine]
        for program in engines or ([] if started else [None]):
            check = _ServeCheck if program is not None and program.name == scripts.VLLM else _ProgramCheck
            checked.append(
                check(
                    folder=folder,
                    root=folder,
                    options=options,
                    findings=[*findings],
                    yaml=yaml,
                    name=name,
                    script=script,
                    program=program,
                )
            )
    if read and not checked:  # scripts that measure a server of vLLM, which another one starts
        return []
    checked = checked or [_ProgramCheck(folder=folder, root=folder, options=options, yaml=yaml)]
    models = [one.check() for one in checked]
    for name in read:
        servers = [one.server for one in checked if one.name == name and one.program is not None]
        models[0].findings += shared_gpus(servers, name)
    # Branches that lead to one command with other words, such as eval.sh's tasks, are one server to whoever reads this.
    told: dict[object, ModelCheck] = {}
    for one in checked:
        place = one.program and (one.program.line, one.program.visible_gpus)
        earlier = told.setdefault((one.name, place, replace(one.model, unchecked=())), one)
        if earlier is not one:
            unchecked = dict.fromkeys((*earlier.model.unchecked, *one.model.unchecked))
            earlier.model = replace(earlier.model, unchecked=tuple(unchecked))
            earlier.findings += [finding for finding in one.findings if finding not in earlier.findings]
    return list(told.values())


@dataclass(kw_only=True)
class _ProgramCheck(ModelCheck):
    """The check of one program that a script starts with its YAML file, or of a YAML file by itself."""

    yaml: Path
    name: str = ""
    """The script's name, also where it can't be read."""
    script: scripts.ShellScript | None = None
    program: scripts.Program | None = None
    flags: ProgramFlags | None = None
    num_ranks: int | None = None
    """None where it is not known."""
    unseen_config: str = ""
    """The YAML file that the script passes, when nobody can look into it."""
    unseen_keys: set[str] = field(default_factory=set)
    """Keys of the YAML whose values the script alone does not give."""

    @property
    def server(self) -> Server:
        assert self.program is not None
        return Server(self.program, self.num_ranks, self.known.gpu)

    @property
    def shown_name(self) -> str:
        """The script's name, and the line where it starts several programs."""
        several = self.script is not None and len(self.script.programs) > 1 and self.program is not None
        return f"{self.name}:{self.program.line}" if several and self.program is not None else self.name

    def check_files(self) -> Recorded:
        """Check the stamp and the script, and return what the record beside them is of."""
        if not self.stamp.is_of_triton:
            self.findings += changed_files(self.stamp, self.folder, self.folder, "")
        if self.script is not None:
            self.findings += scripts.variable_problems(self.script.variables, self.name)
            self.findings += lost_exports(self.script, self.stamp, self.name)
        return read_recorded(self.folder, "")[0]

    def checkpoint(
        self, model: str, file: str, line: int | None, *, has_tokenizer: bool, for_vllm: bool = False
    ) -> CheckpointFacts | None:
        """Find out what the model is, which `file` names in its `line`, and return what the checkpoint's files say.

        :param has_tokenizer: whether its tokenizer is used.
        """
        is_named = bool(model) or self.options.model_root is not None
        folder = find_checkpoint_folder(model, self.folder, self.options.model_root) if is_named else None
        facts = self.read_checkpoint(folder, folder if has_tokenizer else None, for_vllm=for_vllm)
        self.identify(model, facts, file, line)
        return facts

    def check(self) -> ModelCheck:
        recorded = self.check_files()
        if self.script is not None and self.program is None:
            self.unchecked.append(f"the flags in {self.name}, because it starts no program that is known here")
        document = self.document()
        file = (self.name or self.yaml.name) if document is None else document.file
        in_image = release_of_image(self.image)
        release, self.version_from, unsure = find_release(
            self.options, in_image or recorded.release, self.stamp, record_file=self.record_file(in_image), file=file
        )
        self.version, model = release.version, None
        if document is not None or self.program is not None:
            self.findings += unsure
            in_yaml = None if document is None else document.values.get("model")
            model = (self.program and self.program.model) or (in_yaml if isinstance(in_yaml, str) else None)
            self.check_rules(document, release, model or "")
        return self.done(self.shown_name if file == self.name else file, model, "none", "tensorrt_llm")

    @property
    def image(self) -> tuple[str, str] | None:
        """The container's image, as Program has it."""
        if self.program is None or self.script is None:
            return None
        return self.program.image or scripts.image_among(self.script.batch_options)

    def record_file(self, in_image: str | None) -> str:
        return RELEASE_RECORD if in_image is None else self.name

    def document(self) -> Document | None:
        """Return the content of the YAML file, where one is used."""
        is_there = os.path.lexists(self.yaml)
        if self.script is None or (self.program is None and is_there):
            return self.keep(read_yaml(self.yaml, self.yaml.name))
        if self.program is None:
            return None
        word = self.program.flag(*YAML_FLAGS)
        if word is not None:
            document = self.passed(word)
            self.unseen_config = _named(word) if document is None else ""
            return document
        is_used = any(program.hides_flags or program.flag(*YAML_FLAGS) for program in self.script.programs)
        if self.program.name != scripts.QUICKSTART and is_there and not is_used:
            message = f"{self.name} starts {self.program.name} without {self.yaml.name}"
            fix = f'write {YAML_FLAGS[0]} "$here/{self.yaml.name}" after {self.program.name}'
            self.findings.append(codes.UNUSED_ARGUMENTS.finding(message, fix, file=self.name))
        return None

    def passed(self, word: Word) -> Document | None:
        """Return the content of the file that the script passes: one that it writes itself, or one beside it."""
        assert self.program is not None
        assert self.script is not None
        name = base_name(word.text)
        written = None if name not in self.program.files else self.written(self.program.files[name])
        if written is not None or (name in self.program.files and not os.path.isfile(self.folder / name)):
            return written
        if "$" in name:
            copied = next(
                (match[0] for match in _yaml_names(self.script) if os.path.isfile(self.folder / match[0])), None
            )
            return None if copied is None else self.keep(read_yaml(self.folder / copied, copied))
        places = [self.folder / name] if "$" in word.text else [self.folder / word.text, self.folder / name]
        path = next((path for path in places if os.path.isfile(path)), None)
        starts = {base_name(one.text) for start in self.program.starts for one in start}
        is_here = word.is_known and not word.text.startswith("/") and not starts & _ELSEWHERE
        if path is None and not (is_here or _OWN_FOLDER.search(word.text)):
            return None
        return self.keep(read_yaml(path or self.folder / name, name))

    def written(self, file: Written) -> Document | None:
        """Return the YAML that the script writes, with the keys whose values it alone does not give in `unseen`."""
        text = UNSEEN.sub(UNKNOWN, file.text)
        document, findings = read_written_yaml(text, self.name, file.line)
        if UNKNOWN not in text:
            return self.keep((document, findings))
        flat = {} if document is None else flattened(document.values)
        if document is None or any(UNKNOWN in key for key in flat):
            return None
        self.findings += findings
        self.unseen_keys = {key for key, value in flat.items() if _ASCII_UNKNOWN in ascii(value)}
        return replace(document, values=_without(document.values))

    def check_rules(self, document: Document | None, release: Release, model: str) -> None:
        """Check the arguments wherever they are given, the checkpoint, the rules and the memory."""
        is_model_yaml = document is not None and document.file == MODEL_YAML
        arguments = CheckedArguments()
        if document is not None:
            sections = (TRITON_SECTION, *UPSTREAM_KEYS) if is_model_yaml else ()
            arguments = check_schema(document, release, other_sections=sections)
            self.findings += arguments.findings
        settings, unknown = self.settings(document, arguments, release)
        line = None if document is None else document.line("model")
        file = self.name if self.script is not None else self.yaml.name
        facts = self.checkpoint(model, file, line, has_tokenizer="tokenizer" not in settings)
        self.deployment = Deployment(
            settings=settings,
            unknown=unknown,
            release=release,
            triton=flattened(triton_settings(document)) if document is not None and is_model_yaml else {},
            environment=self.environment(self.script, document, release),
            **self.known.facts,
        )
        in_yaml = None if document is None else place_in(document, arguments, release)

        def place(key: str | None) -> Place:
            if self.flags is not None and (in_yaml is None or key in self.flags.settings):
                return self.flags.place(key)
            return in_yaml(key) if in_yaml is not None else ("", None, key or "")

        self.check_deployment(_misfits(self.deployment), place, facts)
        self.check_ranks(self.deployment)
        if document is not None:
            self.unchecked += self.keep(engine_problems(document, release))

    def settings(
        self, document: Document | None, arguments: CheckedArguments, release: Release
    ) -> tuple[Mapping[str, Any], frozenset[str]]:
        """Return the arguments of file and flags under canonical keys, where the file's win, and the keys that may be
        given elsewhere."""
        settings: Mapping[str, Any] = self.keep(canonical_settings(arguments, release, self.folder, ""))
        if self.script is not None and self.program is not None:
            self.flags = flags = read_flags(self.script, self.program)
            if document is not None:
                unused_flags(flags, document.values, settings, document.file)
            self.findings += flags.findings
            if flags.unread:
                self.unchecked.append(f"flags that are not recorded here: {first_names(flags.unread)}")
            unseen_keys = dict.fromkeys(self.unseen_keys)
            flags.unseen += self.unseen_keys
            flags.unknown |= spelling.canonical(unseen_keys, release.version).keys()
            sizes = () if _SIZES[0] in settings else _SIZES
            self.leave_open(
                flags.settle(self.program, load_release(CANONICAL_RELEASE).keys(), sizes, self.unseen_config)
            )
            return {**_PROGRAM, **flags.settings, **settings}, frozenset(flags.unknown - settings.keys())
        if document is None or document.file == MODEL_YAML:
            return settings, frozenset()
        self.unchecked.append(
            "the rules about what flags may give, because no script that passes the file is beside it"
        )
        settings = {**_PROGRAM, **_divided(self.options.num_gpus, settings), **settings}
        replaced = {key for key in flag_keys() if "." in key and key.partition(".")[0] in document.values}
        return settings, flag_keys() - settings.keys() - replaced

    def leave_open(self, unseen: str) -> None:
        if unseen:
            self.unchecked.append(f"what {self.shown_name} does not say by itself: {unseen}")

    def check_ranks(self, deployment: Deployment) -> None:
        """Compare the ranks with the GPUs, and with those that are started, where they are known."""
        ranks = deployment.settings.get(_SIZES[0], 1) * deployment.context_parallel_size
        if _SIZES[0] in deployment.unknown:
            return
        stages = deployment.settings.get(_SIZES[1], 1)
        gpus = self.known.num_gpus
        file, line, key = self.place(_SIZES[0])
        if _SIZES[1] in deployment.unknown:
            self.findings += (
                count_findings(ranks, gpus, "the instance", file=file, line=line, key=key)
                if gpus is not None and ranks > gpus
                else ()
            )
            return
        self.num_ranks = ranks * stages
        self.compare_gpus(TRTLLM_RANKS, "the instance", file, line, key)
        if self.program is not None and self.script is not None:
            batch = self.script.batch_options
            if are_left_to_slurm(self.program, batch):
                self.unchecked.append(f"what starts the tasks that {self.name} asks Slurm for, as nothing in it does")
                return
            programs = self.script.programs
            self.findings += started_ranks(
                self.program, programs, self.num_ranks, self.known.gpu, batch, file=self.name
            )

    def compare_gpus(self, way: str, what: str, file: str, line: int | None, key: str) -> None:
        """Compare the ranks with the GPUs that are shown to them, or else with those that the user names. Of several
        programs, none needs all of them."""
        if self.num_ranks is None:
            return
        name, visible = (scripts.VISIBLE_GPUS, None) if self.program is None else self.program.gpus_shown
        self.findings += hidden_gpus(visible, self.num_ranks, self.known.gpu, way, file=self.name, name=name)
        gpus, shown = self.known.num_gpus, visible_gpus(visible)
        several = self.script is not None and len([one for one in self.script.programs if one.is_engine]) > 1
        if gpus is None or shown is not None or (several and gpus > self.num_ranks):
            return
        self.findings += count_findings(self.num_ranks, gpus, what, way, file=file, line=line, key=key)


class _ServeCheck(_ProgramCheck):
    """The check of a script that starts `vllm serve`."""

    def check(self) -> ModelCheck:
        script, program, recorded = self.script, self.program, self.check_files()
        assert script is not None
        assert program is not None
        in_image = vllm_of_image(self.image)
        version, self.version_from, unsure = find_vllm(
            self.options, in_image or recorded.vllm, self.stamp, record_file=self.record_file(in_image), file=self.name
        )
        self.version = version.version
        self.findings += unsure
        self.findings += scripts.vllm_variable_problems(script, version, as_flag)
        flags = read_vllm_flags(script, program, version)
        word = program.flag("--config")
        document = None if word is None else self.passed(word)
        if document is not None:
            add_config(flags, document, version)
        self.findings += flags.findings
        config = _named(word) if word is not None and document is None else ""
        flags.unknown |= self.unseen_keys
        self.leave_open(flags.settle(program, version.keys(), _SIZES, config))
        model, has_tokenizer = program.model or "", "tokenizer" not in flags.places
        if not model and document is not None:
            model = str(document.values.get("model") or "")
        facts = self.checkpoint(model, self.name, None, has_tokenizer=has_tokenizer, for_vllm=True)
        self.check_vllm_ranks(flags)
        deployment = VllmDeployment(
            settings=flags.settings,
            unknown=frozenset(flags.unknown),
            vllm=version,
            environment=script.known_values,
            **self.known.facts,
        )

        def place(key: str | None) -> Place:
            is_in_file = document is not None and key not in flags.places
            return document.place(key) if is_in_file and document is not None else flags.place(key)

        self.check_on_vllm(deployment, place, facts)
        return self.done(self.shown_name, model, "none", "vllm")

    def check_vllm_ranks(self, flags: ProgramFlags) -> None:
        """Compare the ranks with the GPUs, and with the processes that are started, as far as they are known."""
        if flags.unknown.intersection(_SIZES):
            return
        self.num_ranks = math.prod(flags.settings.get(size, 1) for size in _SIZES)
        line = next((flags.places[size][0] for size in _SIZES if size in flags.places), None)
        self.compare_gpus(VLLM_RANKS, "the server", self.name, line, _SIZES[0])
        if self.program is not None and self.script is not None:
            self.findings += repeated_servers(self.program, self.script.batch_options, file=self.name)


def _named(word: Word) -> str:
    """Name a file that nobody can look into: by its path, or by the line whose expression gives it."""
    return word.text if word.is_known else f"its YAML file (line {word.line})"


def _passes(script: scripts.ShellScript, name: str) -> bool:
    """Whether a script passes a YAML file of that name, or a copy of it under a name that is made when it runs."""
    words = [word for program in script.programs if (word := program.flag(*YAML_FLAGS)) is not None]
    names = {base_name(word.text) for word in words}
    return name in names or (any("$" in one for one in names) and name in {match[0] for match in _yaml_names(script)})


def _yaml_names(script: scripts.ShellScript) -> Iterator[re.Match[str]]:
    return (match for command in script.commands for word in command if (match := _YAML_NAME.search(word.text)))


def _without(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the mapping without what the script alone does not say."""
    below = {key: _without(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in below.items() if isinstance(value, dict) or _ASCII_UNKNOWN not in ascii(value)}


def _divided(num_gpus: int | None, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that follow from the number of GPUs: tensor parallelism alone, unless the file says more."""
    if num_gpus is None:
        return {}
    each = settings.get("context_parallel_size", 1)
    ranks = settings.get("tensor_parallel_size", num_gpus // each or 1)
    if num_gpus % (ranks * each):
        return {}
    return {"tensor_parallel_size": ranks, "pipeline_parallel_size": num_gpus // (ranks * each)}


def _misfits(deployment: Deployment) -> list[tuple[Code, Violation]]:
    """Find what does not fit the memory of the GPUs. Of a file whose flags are not known, only the weights are judged,
    because the weights of a rank hardly depend on the rest."""
    if not deployment.unknown:
        return list(memory_problems(deployment))
    if "tensor_parallel_size" not in deployment.settings or deployment.unknown.issuperset(_DIVIDING):
        return []
    found = memory_problems(replace(deployment, unknown=frozenset()))
    return [(code, violation) for code, violation in found if code is codes.WEIGHTS_TOO_LARGE]
