"""The options of a warm-up."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from deepseek_triton_build.check import Finding
from deepseek_triton_tools.host.host_memory import BUDGET_SHARE, HostMemory, read_host_memory, read_mounts
from deepseek_triton_tools.repository.checkpoint_files import CheckpointFiles, WeightFile, find_checkpoints
from deepseek_triton_tools.warming.filesystem import FileSystem, file_system_of
from deepseek_triton_tools.warming.page_cache import ResidentFile, known_sum

# Each job is a thread with an open file. No storage is faster with more of them.
MOST_JOBS = 64


@dataclass(frozen=True)
class Share:
    """This process's part of a node's work: share `index` of `count`, counted from 1."""

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise ValueError(f"expected a share K/N with K from 1 to N, got {self.index}/{self.count}")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True, kw_only=True)
class WarmOptions:
    """`jobs`, `budget` and `rate_limit` are for the whole node, whatever its number of shares.

    :raises ValueError: lists everything that is wrong.
    """

    share: Share = Share()
    jobs: int | None = None
    """Windows of files that this node reads at once. None: the number that suits the file system."""
    budget: int | None = None
    """Bytes of weights that may lie in this node's page cache. None: what fits the available memory."""
    rate_limit: int | None = None
    """Bytes a second that this node may read. None: no limit."""
    verify: bool = False
    """Compute the checksums of the files, where the checkpoint has them."""
    stall_s: float = 30.0
    """Seconds without a byte of a file after which the file is reported."""
    give_up_s: float | None = None
    """Seconds without a byte of any file after which the warm-up ends. None: it waits, as the engine would."""

    def __post_init__(self) -> None:
        if not isinstance(self.share, Share):
            raise ValueError(f"share: expected a Share, got {self.share!r}")
        problems = [
            f"{name}: expected {expected}, got {getattr(self, name)}"
            for name, (is_allowed, expected) in _LIMITS.items()
            if getattr(self, name) is not None and not is_allowed(getattr(self, name))
        ]
        if problems:
            raise ValueError("; ".join(problems))


_LIMITS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "jobs": (lambda value: 1 <= value <= MOST_JOBS, f"1 to {MOST_JOBS}"),
    "budget": (lambda value: value >= 0, "a number of bytes from 0"),
    "rate_limit": (lambda value: value >= 1, "a number of bytes from 1"),
    "stall_s": (lambda value: value > 0, "a number of seconds above 0"),
    "give_up_s": (lambda value: value > 0, "a number of seconds above 0"),
}
"""Field -> the test that its value has to pass unless it is None, and that test in words."""


Selection = Literal["chosen", "too much", "other share", "damaged"]
"""This process warms the file; it does not fit the budget; another process warms it; or it is damaged."""


@dataclass(frozen=True)
class SurveyedFile:
    file: WeightFile
    file_system: FileSystem
    resident: int | None
    """Bytes of it in the page cache; None: unknown."""
    residency_method: str | None
    """The source of `resident`: "cachestat", "mincore", or "memory" (the file system is in memory). None: unknown."""
    selection: Selection

    def ask_resident(self) -> int | None:
        """Bytes of it in the page cache now. None: unknown, or the file can't be opened."""
        return _residency(self.file, self.file_system)[0]


@dataclass(frozen=True, kw_only=True)
class Survey:
    checkpoints: tuple[CheckpointFiles, ...]
    files: tuple[SurveyedFile, ...]
    """The files of all shares, in the order in which they are read."""
    memory: HostMemory
    budget: int
    """Bytes of weights that may lie in this node's page cache."""
    jobs: int
    """Jobs of this share. 0 where there are more shares than jobs and this one has nothing to do."""
    num_working_shares: int
    options: WarmOptions

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.file.size for each in self.files)

    @property
    def resident(self) -> int | None:
        """Bytes of all files in the page cache; None when it is unknown for one of them."""
        return known_sum(each.resident for each in self.files)

    @property
    def lacking(self) -> int:
        """Bytes by which the files exceed the budget; 0 when they fit."""
        return max(0, self.needed - self.budget)

    @property
    def needed(self) -> int:
        """Bytes of memory that the files need. Files that lie in memory anyway (tmpfs) need none. Nor do files that are
        all resident already: they may be locked, and locked pages are no part of MemAvailable."""
        if self.options.budget is None and self.resident == self.size:
            return 0
        return sum(each.file.size for each in self.files if each.file_system.reading.jobs)

    @property
    def exceeds_headroom(self) -> bool:
        """--budget asks for more than there is room for: the first files are dropped while the last ones are read."""
        return min(self.budget, self.needed) > self.memory.headroom

    @property
    def chosen(self) -> tuple[SurveyedFile, ...]:
        return tuple(each for each in self.files if each.selection == "chosen")

    @property
    def left_out(self) -> tuple[SurveyedFile, ...]:
        """The files of this share that do not fit."""
        return tuple(each for each in self.files if each.selection == "too much")

    @property
    def chosen_size(self) -> int:
        return sum(each.file.size for each in self.chosen)

    @property
    def is_damaged(self) -> bool:
        """A file of a checkpoint is missing, cut off or otherwise wrong. Known only after the damage check."""
        return any(finding.severity == "error" for each in self.checkpoints for finding in each.findings)


def take_survey(sources: str | Sequence[str], options: WarmOptions = WarmOptions()) -> Survey:
    """Survey one checkpoint or several. Reads no weights.

    :raises CheckpointError: when a source is no checkpoint.
    :raises OSError: when this machine's memory or mounts can't be read.
    """
    sources = [sources] if isinstance(sources, str) else sources
    checkpoints = tuple(checkpoint for source in sources for checkpoint in find_checkpoints(source))
    # Each file once: two repositories may serve one checkpoint.
    files = list({file.path.resolve(): file for checkpoint in checkpoints for file in checkpoint.files}.values())
    mounts = read_mounts()
    places = {file.path: file.path.resolve() for file in files}
    # Each folder is looked up once, assuming that no mount lies on a single file.
    by_folder = {place.parent: place for place in places.values()}
    systems_of_folders = {folder: file_system_of(place, mounts) for folder, place in by_folder.items()}
    systems = {path: systems_of_folders[place.parent] for path, place in places.items()}
    memory = read_host_memory()
    budget = options.budget if options.budget is not None else int(memory.headroom * BUDGET_SHARE)
    jobs = options.jobs or min((system.reading.jobs for system in systems.values() if system.reading.jobs), default=1)
    share = options.share
    survey = Survey(
        checkpoints=checkpoints,
        files=tuple(
            SurveyedFile(file, systems[file.path], *_residency(file, systems[file.path]), "other share")
            for file in files
        ),
        memory=memory,
        budget=budget,
        jobs=jobs // share.count + (share.index <= jobs % share.count),
        num_working_shares=min(share.count, jobs),
        options=options,
    )
    return _with_selections(survey)


def with_findings(survey: Survey, findings: Mapping[Path, Sequence[Finding]]) -> Survey:
    """`survey` with the faults of its checkpoints; damaged files are no longer chosen.

    :param findings: the folder of a checkpoint -> its findings.
    """
    checkpoints = tuple(replace(each, findings=tuple(findings.get(each.folder, ()))) for each in survey.checkpoints)
    errors = (finding for of_folder in findings.values() for finding in of_folder if finding.severity == "error")
    damaged = {Path(finding.file) for finding in errors}
    files = tuple(replace(each, selection="damaged") if each.file.path in damaged else each for each in survey.files)
    return replace(survey, checkpoints=checkpoints, files=files)


def _with_selections(survey: Survey) -> Survey:
    """Select the files that this share warms: its part of them, as far as they fit.

    Where not all files fit, each share gets an equal part of the budget. The files are divided among the shares without
    regard to what is resident, because other processes would measure that at another time.
    """
    share, count = survey.options.share, survey.num_working_shares
    if share.index > count:
        return survey
    mine = {file.path for file in files_of_share([each.file for each in survey.files], Share(share.index, count))}
    left = survey.budget // count if survey.lacking else survey.size
    files = []
    for each in survey.files:
        if each.file.path in mine:
            cost = each.file.size if each.file_system.reading.jobs else 0
            selection: Selection = "chosen" if cost <= left else "too much"
            left -= cost if selection == "chosen" else 0
            each = replace(each, selection=selection)
        files.append(each)
    return replace(survey, files=tuple(files))


def files_of_share(files: Sequence[WeightFile], share: Share) -> tuple[WeightFile, ...]:
    """The files of one share of the work, in their order; the shares are about equal in bytes.

    The largest file is given out first, and each file to the share that has the fewest bytes. Every process that has
    the same files divides them in the same way.
    """
    loads = [0] * share.count
    chosen = set()
    for file in sorted(files, key=lambda file: (-file.size, file.path)):
        index = loads.index(min(loads))
        loads[index] += file.size
        if index == share.index - 1:
            chosen.add(file.path)
    return tuple(file for file in files if file.path in chosen)


def _residency(file: WeightFile, system: FileSystem) -> tuple[int | None, str | None]:
    """Bytes of the file in the page cache, and how that is known. A file that can't be opened is reported later, by the
    damage check or when it is read."""
    if not system.reading.jobs:
        return file.size, "memory"
    if not system.reading.is_cached:
        return None, None
    try:
        with closing(ResidentFile(file.path)) as pages:
            return pages.resident(), pages.method
    except OSError:
        return None, None
