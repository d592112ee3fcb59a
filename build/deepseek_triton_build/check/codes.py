"""The codes of the findings that no rule makes; their words are in data/rules.yaml.

The letter says what a finding is about. S: files (up to S009) and LLM arguments. T: triton_config (up to T009), GPUs
and their memory. C: config.pbtxt. W: the checkpoint. G: a pair. B: published faults.
"""

from functools import partial

from deepseek_triton_build.data.finding import Code

_error, _warning, _note = (partial(Code, severity=severity) for severity in ("error", "warning", "note"))

UNREADABLE = _error("S001")
BROKEN = _error("S002")
NOT_A_MAPPING = _error("S003")
DUPLICATE_KEY = _error("S004")
CHANGED = _note("S005")
MISSING_FILE = _error("S008")
CHANGED_PROGRAM = _warning("S009")
BROKEN_SCRIPT = _error("S010")
BAD_RECORD = _warning("S006")
RELEASE_ASSUMED = _note("S007")

WRONG_KEY = _error("S011")
UNKNOWN_KEY = _warning("S012")
MOVED_KEY = _error("S013")
WRONG_TYPE = _error("S014")
WRONG_CHOICE = _error("S015")
OUT_OF_RANGE = _error("S016")
WRONG_NULL = _error("S017")
NOT_A_SECTION = _error("S018")
NOT_LOOKED_INTO = _note("S019")
MODEL_MISSING = _error("S020")
IGNORED_KEY = _warning("S021")

WRONG_FLAG = _error("S022")
UNUSED_FLAG = _warning("S023")
UNUSED_ARGUMENTS = _error("S024")
MISSPELLED_VARIABLE = _warning("S025")
WRONG_VARIABLE = _warning("S026")
OBSOLETE_VARIABLE = _warning("S028")
OTHER_RECORD = _error("S029")
LOST_ARGUMENTS = _error("S030")
REPEATED_FLAG = _warning("S031")
BROKEN_START = _error("S032")
LOST_EXPORT = _warning("S033")
NOT_EXECUTABLE = _error("S034")
REFUSED_BY_ENGINE = _error("S027")

WRONG_SETTING = _error("T001")
WRONG_SETTING_VALUE = _error("T002")

NO_PROTOBUF = _note("C001")
NO_CONFIG = _error("C002")
BROKEN_CONFIG = _error("C003")
WRONG_NAME = _error("C004")
WRONG_BACKEND = _error("C005")
POLICY_DIFFERS = _error("C006")
POLICY_ONLY_COMPLETED = _warning("C007")
WRONG_VLLM_BACKEND = _error("C010")
MISSING_TENSOR = _error("C008")
EXTRA_TENSOR = _warning("C009")
WRONG_VERSION = _error("C011")
ABSENT_VERSION = _warning("C012")

NO_GPUS = _error("T011")
GPUS_SHARED = _error("T012")
TOO_FEW_GPUS = _error("T013")
IDLE_GPUS = _warning("T014")
WRONG_KIND = _warning("T015")
WEIGHTS_TOO_LARGE = _error("T016")
NO_ROOM_FOR_CACHE = _warning("T017")
WRONG_RANKS = _error("T018")

MODEL_NOT_HERE = _warning("W001")
MODEL_GONE = _error("W002")
MODEL_ON_HUB = _note("W003")
NO_MODEL_HERE = {code.code for code in (MODEL_NOT_HERE, MODEL_GONE, MODEL_ON_HUB)}
WRONG_ARCHITECTURE = _error("W004")
UNKNOWN_ARCHITECTURE = _warning("W005")
WRONG_PRECISION = _error("W006")
NO_WEIGHTS = _error("W007")
MISSING_SHARD = _error("W008")
BROKEN_SHARD = _error("W009")
WRONG_LENGTH = _error("W010")
INCOMPLETE = {NO_WEIGHTS.code: False, MISSING_SHARD.code: False, BROKEN_SHARD.code: True, WRONG_LENGTH.code: True}
"""Code -> whether a file is damaged; without files `load_format: dummy` loads."""
MISSING_TENSORS = _error("W011")
STRAY_SHARD = _warning("W012")
UNLISTED_TENSORS = _warning("W013")

NO_TOKENIZER = _error("W014")
WRONG_TOKENIZER = _error("W015")
WRONG_SHAPE = _error("W016")
NO_MTP_LAYER = _error("W017")
WRONG_QUANT_CONFIG = _error("W018")
OTHER_FOLDER = _warning("W019")
CHANGED_CHECKPOINT = _error("W020")
CUT_CHECKPOINT = _warning("W021")
STORED_OTHERWISE = _error("W022")
TWO_STATEMENTS = _warning("W023")
WRONG_TENSORS = _error("W024")

WRONG_SIDE = _error("G035")
KNOWN_ISSUE = _warning("B001")
"""Where nothing is known for the release, a note (rules/known_issues.py)."""

CHECKS = tuple(sorted((value for value in globals().values() if isinstance(value, Code)), key=lambda c: c.code))
"""All codes of this file, sorted."""
