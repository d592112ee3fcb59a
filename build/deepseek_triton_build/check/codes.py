"""Every code that `check` has besides the rules'.

S: files (to S009) and LLM arguments; T: triton_config (to T009), GPUs and their memory; C: config.pbtxt; W: the
checkpoint.
"""

from __future__ import annotations

from deepseek_triton_build.check.finding import CheckCode

_MODEL_CONFIGURATION = "Triton Inference Server docs/user_guide/model_configuration.md"
_OUR_BACKEND = "this project's backend: docs/configuration.md"
_LLM_ARGS = "tensorrt_llm/llmapi/llm_args.py of the release, as its record here has it"
_LLMAPI = "triton-inference-server/tensorrtllm_backend docs/llmapi.md"
_DEEPSEEK = "config.json of deepseek-ai/DeepSeek-V3 and deepseek-ai/DeepSeek-V3.2"
_SAFETENSORS = "the safetensors format, https://docs.rs/crate/safetensors"

UNREADABLE = CheckCode(
    code="S001",
    severity="error",
    title="Every file that is needed can be read",
    why="tritonserver can't read it either, and the model does not load.",
    source=_MODEL_CONFIGURATION,
)
BROKEN = CheckCode(
    code="S002",
    severity="error",
    title="YAML files are YAML, and JSON files JSON",
    why="The load stops at the first character that isn't.",
    source="PyYAML's safe loader, which both upstream's model.py and this project's backend use",
)
NOT_A_MAPPING = CheckCode(
    code="S003",
    severity="error",
    title="model.yaml is a mapping of LLM arguments",
    why="The engine is given its keys as arguments.",
    source=_OUR_BACKEND,
)
DUPLICATE_KEY = CheckCode(
    code="S004",
    severity="error",
    title="No key is given twice",
    why="PyYAML takes the last one without a word, so that what is read above is not what runs.",
    source="PyYAML's safe loader, as it behaves",
)
CHANGED = CheckCode(
    code="S005",
    severity="note",
    title="The files are as they were generated",
    why="A hand edit is fine; building again asks before it replaces one.",
    source="deepseek-triton.json, the stamp of the generated repository",
)
BAD_RECORD = CheckCode(
    code="S006",
    severity="warning",
    title="What the repository says of its release, variant and GPU is known here",
    why="Without it, the defaults are checked against instead.",
    source="deepseek-triton.json and release.yaml of the generated repository",
)
RELEASE_ASSUMED = CheckCode(
    code="S007",
    severity="note",
    title="The TensorRT-LLM release is known",
    why="Keys differ from release to release; another one is checked by saying which.",
    source=_LLM_ARGS,
)

WRONG_KEY = CheckCode(
    code="S011",
    severity="error",
    title="Every key is an LLM argument of the release",
    why="The engine refuses unknown arguments.",
    source=_LLM_ARGS,
)
UNKNOWN_KEY = CheckCode(
    code="S012",
    severity="warning",
    title="Every key is known here",
    why="Not every key of this section is recorded, so it may still exist. If it doesn't, the engine refuses it.",
    source=_LLM_ARGS,
)
MOVED_KEY = CheckCode(
    code="S013",
    severity="error",
    title="Every key stands where the release has it",
    why="Keys of another release are refused or, worse, ignored.",
    source="the release notes and llm_args.py of both releases, as releases/spelling.yaml here has them",
)
WRONG_TYPE = CheckCode(
    code="S014",
    severity="error",
    title="Every value has its argument's type",
    why="The engine validates its arguments and stops the load.",
    source=_LLM_ARGS,
)
WRONG_CHOICE = CheckCode(
    code="S015",
    severity="error",
    title="Every value is one of those its argument takes",
    why="The engine validates its arguments and stops the load.",
    source=_LLM_ARGS,
)
OUT_OF_RANGE = CheckCode(
    code="S016",
    severity="error",
    title="Every number is in the range of what it counts",
    why="No engine can be made of no GPUs, no tokens or more than all of the memory.",
    source="tensorrt_llm/llmapi/llm_args.py; the meaning of the arguments",
)
WRONG_NULL = CheckCode(
    code="S017",
    severity="error",
    title="Only optional arguments are null",
    why="The engine validates its arguments and stops the load.",
    source=_LLM_ARGS,
)
NOT_A_SECTION = CheckCode(
    code="S018",
    severity="error",
    title="A section has its keys below it",
    why="The engine validates its arguments and stops the load.",
    source=_LLM_ARGS,
)
NOT_LOOKED_INTO = CheckCode(
    code="S019",
    severity="note",
    title="Sections are of a kind that is recorded here",
    why="Only MTP and DeepSeek sparse attention are: other kinds are not used with DeepSeek, and go unchecked.",
    source=_LLM_ARGS,
)
MODEL_MISSING = CheckCode(
    code="S020",
    severity="error",
    title="model.yaml names the model",
    why="There is nothing to load.",
    source=_LLM_ARGS,
)

IGNORED_KEY = CheckCode(
    code="S021",
    severity="warning",
    title="Every key of a section does something",
    why="The sections of these releases pass over what they don't know, so that the setting has no effect.",
    source=_LLM_ARGS,
    releases="0.21",
)

WRONG_SETTING = CheckCode(
    code="T001",
    severity="error",
    title="Every key of triton_config is one of the backend's",
    why="The backend refuses to load.",
    source=_OUR_BACKEND,
)
WRONG_SETTING_VALUE = CheckCode(
    code="T002",
    severity="error",
    title="Every value of triton_config is one the backend takes",
    why="The backend refuses to load.",
    source=_OUR_BACKEND,
)

NO_PROTOBUF = CheckCode(
    code="C001",
    severity="note",
    title="Triton's protobuf messages are installed here",
    why="config.pbtxt is read by them, and is not checked without.",
    source="tritonclient",
)
NO_CONFIG = CheckCode(
    code="C002",
    severity="error",
    title="The model has a config.pbtxt",
    why="Without the inputs and outputs it declares, Triton does not load the model.",
    source=_MODEL_CONFIGURATION,
)
BROKEN_CONFIG = CheckCode(
    code="C003",
    severity="error",
    title="config.pbtxt is a ModelConfig",
    why="Triton does not load the model.",
    source=_MODEL_CONFIGURATION,
)
WRONG_NAME = CheckCode(
    code="C004",
    severity="error",
    title="The model's name is its folder's",
    why="Triton does not load the model.",
    source=f"{_MODEL_CONFIGURATION}, Name, Platform and Backend",
)
WRONG_BACKEND = CheckCode(
    code="C005",
    severity="error",
    title="The model runs on Triton's Python backend",
    why="model.py is for no other.",
    source=f"{_MODEL_CONFIGURATION}, Name, Platform and Backend",
)
POLICY_DIFFERS = CheckCode(
    code="C006",
    severity="error",
    title="config.pbtxt and model.yaml agree on decoupled and max_batch_size",
    why="config.pbtxt decides; where they differ, model.py sends more or fewer responses than Triton takes.",
    source=f"{_MODEL_CONFIGURATION}, Model Transaction Policy; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
POLICY_ONLY_COMPLETED = CheckCode(
    code="C007",
    severity="warning",
    title="config.pbtxt itself says what model.yaml asks for",
    why="Upstream's model.py adds it while Triton completes the configuration, which --disable-auto-complete-config "
    "turns off.",
    source=f"{_MODEL_CONFIGURATION}, Auto-Generated Model Configuration; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
MISSING_TENSOR = CheckCode(
    code="C008",
    severity="error",
    title="config.pbtxt declares every tensor of the wire contract once, with its type, shape and optional",
    why="Requests with it, or without an input that is not optional, are refused, and a response with it fails.",
    source="docs/contract.md",
)
EXTRA_TENSOR = CheckCode(
    code="C009",
    severity="warning",
    title="config.pbtxt declares no other tensors",
    why="The backend refuses an input it doesn't know, and never sends such an output.",
    source="docs/contract.md",
)

NO_GPUS = CheckCode(
    code="T011",
    severity="error",
    title="Each of several instances has GPUs of its own",
    why="The instances would all take the same GPUs: the second one runs out of memory.",
    source=_LLMAPI,
)
GPUS_SHARED = CheckCode(
    code="T012",
    severity="error",
    title="No GPU is given twice",
    why="Two ranks on one GPU run out of memory.",
    source=_LLMAPI,
)
TOO_FEW_GPUS = CheckCode(
    code="T013",
    severity="error",
    title="An instance has as many GPUs as ranks",
    why="Tensor x pipeline parallelism is the number of ranks; each needs a GPU.",
    source=_LLMAPI,
)
IDLE_GPUS = CheckCode(
    code="T014",
    severity="warning",
    title="No GPU of an instance is left without a rank",
    why="It stays idle.",
    source=_LLMAPI,
)
WRONG_KIND = CheckCode(
    code="T015",
    severity="warning",
    title="Instances are KIND_CPU",
    why="The engine takes the GPUs by itself. Triton makes an instance of KIND_GPU, or without a kind, for every GPU "
    "there is, each of which would load the model.",
    source=f"{_MODEL_CONFIGURATION}, Instance Groups; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
WEIGHTS_TOO_LARGE = CheckCode(
    code="T016",
    severity="error",
    title="The weights fit the GPUs",
    why="The load ends out of memory, often after most of an hour.",
    source="the shapes of the model and how its weights are stored; docs/generator.md, Memory",
)
NO_ROOM_FOR_CACHE = CheckCode(
    code="T017",
    severity="warning",
    title="There is room for a KV cache",
    why="Weights are exact, workspace is estimated: what is left may hold no request of 8,192 tokens, or nothing.",
    source="the plan's own arithmetic; docs/generator.md, Memory",
)

MODEL_NOT_HERE = CheckCode(
    code="W001",
    severity="warning",
    title="The checkpoint's folder is here",
    why="It may be another path inside the container; here its files go unchecked.",
    source="tensorrt_llm.LLM: model is a folder or a Hugging Face name",
)
MODEL_GONE = CheckCode(
    code="W002",
    severity="error",
    title="The checkpoint's folder is here, as a strict check asks",
    why="The load fails.",
    source="tensorrt_llm.LLM: model is a folder or a Hugging Face name",
)
MODEL_ON_HUB = CheckCode(
    code="W003",
    severity="note",
    title="The checkpoint is a folder",
    why="A Hugging Face name is downloaded at the first load; nothing is looked up here.",
    source="tensorrt_llm.LLM: model is a folder or a Hugging Face name",
)
WRONG_ARCHITECTURE = CheckCode(
    code="W004",
    severity="error",
    title="The checkpoint is of the variant that the repository was generated for",
    why="Memory, parallelism and sparse attention were planned for another model.",
    source=_DEEPSEEK,
)
UNKNOWN_ARCHITECTURE = CheckCode(
    code="W005",
    severity="warning",
    title="The checkpoint is a DeepSeek-V3, R1 or V3.2",
    why="Rules and memory are known for these only; the others go unchecked.",
    source=_DEEPSEEK,
)
WRONG_PRECISION = CheckCode(
    code="W006",
    severity="error",
    title="The checkpoint's quantization is the one that was planned",
    why="Memory and the MoE back end were chosen for it, and a GPU without it can't run it.",
    source="hf_quant_config.json of NVIDIA's checkpoints, quantization_config of DeepSeek's",
)
NO_WEIGHTS = CheckCode(
    code="W007",
    severity="error",
    title="The checkpoint holds weights",
    why="The load fails.",
    source=_SAFETENSORS,
)
MISSING_SHARD = CheckCode(
    code="W008",
    severity="error",
    title="Every shard of the index is there",
    why="The load fails, often after most of an hour.",
    source="model.safetensors.index.json, as transformers writes it",
)
BROKEN_SHARD = CheckCode(
    code="W009",
    severity="error",
    title="Every shard is a file with a readable header, in which shapes, offsets and types agree",
    why="The load fails, often after most of an hour.",
    source=_SAFETENSORS,
)
WRONG_LENGTH = CheckCode(
    code="W010",
    severity="error",
    title="Every shard is as long as its header says",
    why="A download that broke off leaves a shorter file; the load fails, often after most of an hour.",
    source=_SAFETENSORS,
)
MISSING_TENSORS = CheckCode(
    code="W011",
    severity="error",
    title="Every shard holds the tensors that the index has in it",
    why="The weights are of another checkpoint or half of one; the load fails or, worse, does not.",
    source="model.safetensors.index.json, as transformers writes it",
)
STRAY_SHARD = CheckCode(
    code="W012",
    severity="warning",
    title="Every *.safetensors file in the folder is in the index",
    why="TensorRT-LLM loads all that are in the folder, whatever the index says.",
    source="TensorRT-LLM, weight_loader.py",
)
UNLISTED_TENSORS = CheckCode(
    code="W013",
    severity="warning",
    title="Every tensor of a shard is in the index, under that shard",
    why="The shard and the index are of two checkpoints; of a tensor that two shards hold, the last one read counts.",
    source="TensorRT-LLM, weight_loader.py",
)

CHECKS = tuple(sorted((value for value in globals().values() if isinstance(value, CheckCode)), key=lambda c: c.code))
"""All of them, by code."""
