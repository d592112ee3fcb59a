"""The codes of every finding of `check` that is not about a rule.

The letter says what a finding is about. S: files (up to S009) and LLM arguments. T: triton_config (up to T009), GPUs
and their memory. C: config.pbtxt. W: the checkpoint.
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
    why="tritonserver can't read such a file either, so the model does not load.",
    source=_MODEL_CONFIGURATION,
)
BROKEN = CheckCode(
    code="S002",
    severity="error",
    title="YAML files are YAML, and JSON files JSON",
    why="The load stops where the file can't be parsed.",
    source="PyYAML's safe loader, which both upstream's model.py and this project's backend use",
)
NOT_A_MAPPING = CheckCode(
    code="S003",
    severity="error",
    title="model.yaml is a mapping of LLM arguments",
    why="Its keys are passed to the engine as arguments.",
    source=_OUR_BACKEND,
)
DUPLICATE_KEY = CheckCode(
    code="S004",
    severity="error",
    title="No key is given twice",
    why="PyYAML takes the last one without a warning, so the value further up has no effect.",
    source="PyYAML's safe loader, as it behaves",
)
CHANGED = CheckCode(
    code="S005",
    severity="note",
    title="The files are as they were generated",
    why="An edit by hand is fine. `build` replaces an edited file only with --force.",
    source="deepseek-triton.json, the stamp of the generated repository",
)
BAD_RECORD = CheckCode(
    code="S006",
    severity="warning",
    title="The release, the variant and the GPU that the repository names are known here",
    why="What is not known here is not used, and the repository is checked against the defaults.",
    source="deepseek-triton.json and release.yaml of the generated repository",
)
RELEASE_ASSUMED = CheckCode(
    code="S007",
    severity="note",
    title="The TensorRT-LLM release is known",
    why="Keys differ from release to release. --trtllm names the release to check against.",
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
    why="Not every key of this section is recorded here, so the key may exist. If it does not, the engine refuses it.",
    source=_LLM_ARGS,
)
MOVED_KEY = CheckCode(
    code="S013",
    severity="error",
    title="Every key is in the place where the release has it",
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
    title="Every value is one that its argument takes",
    why="The engine validates its arguments and stops the load.",
    source=_LLM_ARGS,
)
OUT_OF_RANGE = CheckCode(
    code="S016",
    severity="error",
    title="Every number is in the range that makes sense for its argument",
    why="An engine needs at least one GPU and one token, and can't use more than all of the memory.",
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
    title="Every section is of a kind that is recorded here",
    why="Only MTP and DeepSeek sparse attention are recorded. Other kinds are not used with DeepSeek, and their keys "
    "are not checked.",
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
    why="The sections of these releases ignore keys that they don't know, so the setting has no effect.",
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
    why="config.pbtxt is read with them. Without them it is not checked.",
    source="tritonclient",
)
NO_CONFIG = CheckCode(
    code="C002",
    severity="error",
    title="The model has a config.pbtxt",
    why="It declares the inputs and outputs, without which Triton does not load the model.",
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
    title="The model has the name of its folder",
    why="Triton does not load the model.",
    source=f"{_MODEL_CONFIGURATION}, Name, Platform and Backend",
)
WRONG_BACKEND = CheckCode(
    code="C005",
    severity="error",
    title="The model runs on Triton's Python backend",
    why="model.py runs on no other backend.",
    source=f"{_MODEL_CONFIGURATION}, Name, Platform and Backend",
)
POLICY_DIFFERS = CheckCode(
    code="C006",
    severity="error",
    title="config.pbtxt and model.yaml agree on decoupled and max_batch_size",
    why="config.pbtxt decides. Where the two differ, model.py sends more or fewer responses than Triton expects.",
    source=f"{_MODEL_CONFIGURATION}, Model Transaction Policy; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
POLICY_ONLY_COMPLETED = CheckCode(
    code="C007",
    severity="warning",
    title="config.pbtxt itself says what model.yaml asks for",
    why="Upstream's model.py adds it only while Triton completes the configuration, and --disable-auto-complete-config "
    "turns that off.",
    source=f"{_MODEL_CONFIGURATION}, Auto-Generated Model Configuration; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
MISSING_TENSOR = CheckCode(
    code="C008",
    severity="error",
    title="config.pbtxt declares every tensor of the wire contract once, with its type, shape and optional",
    why="Requests that send a missing or different tensor are refused, and responses that hold one fail. An input that "
    "is not optional has to be in every request.",
    source="docs/contract.md",
)
EXTRA_TENSOR = CheckCode(
    code="C009",
    severity="warning",
    title="config.pbtxt declares no other tensors",
    why="The backend refuses an input that it doesn't know, and never sends an output that it doesn't know.",
    source="docs/contract.md",
)

NO_GPUS = CheckCode(
    code="T011",
    severity="error",
    title="Each of several instances has GPUs of its own",
    why="Otherwise all instances take the same GPUs, and the second one runs out of memory.",
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
    why="The number of ranks is tensor x pipeline parallelism, and each rank needs a GPU.",
    source=_LLMAPI,
)
IDLE_GPUS = CheckCode(
    code="T014",
    severity="warning",
    title="Every GPU of an instance has a rank",
    why="A GPU without a rank stays idle.",
    source=_LLMAPI,
)
WRONG_KIND = CheckCode(
    code="T015",
    severity="warning",
    title="Instances are KIND_CPU",
    why="The engine takes the GPUs by itself. With KIND_GPU, or without a kind, Triton makes one instance for every "
    "GPU, and each of them would load the model.",
    source=f"{_MODEL_CONFIGURATION}, Instance Groups; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
WEIGHTS_TOO_LARGE = CheckCode(
    code="T016",
    severity="error",
    title="The weights fit the GPUs",
    why="The load runs out of memory, often after most of an hour.",
    source="the shapes of the model and how its weights are stored; docs/generator.md, Memory",
)
NO_ROOM_FOR_CACHE = CheckCode(
    code="T017",
    severity="warning",
    title="There is room for a KV cache",
    why="The memory left for the cache may hold no request of 8,192 tokens, or nothing at all. Weights are exact, "
    "workspace is estimated.",
    source="the plan's own arithmetic; docs/generator.md, Memory",
)

MODEL_NOT_HERE = CheckCode(
    code="W001",
    severity="warning",
    title="The checkpoint's folder is here",
    why="It may be at that path inside the container. Here its files are not checked.",
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
    why="A checkpoint with a Hugging Face name is downloaded at the first load. Nothing is looked up here.",
    source="tensorrt_llm.LLM: model is a folder or a Hugging Face name",
)
WRONG_ARCHITECTURE = CheckCode(
    code="W004",
    severity="error",
    title="The checkpoint belongs to the variant that the repository was generated for",
    why="Memory, parallelism and sparse attention were planned for another model.",
    source=_DEEPSEEK,
)
UNKNOWN_ARCHITECTURE = CheckCode(
    code="W005",
    severity="warning",
    title="The checkpoint is a DeepSeek-V3, R1 or V3.2",
    why="Rules and memory are known for these only. Other models are not checked against them.",
    source=_DEEPSEEK,
)
WRONG_PRECISION = CheckCode(
    code="W006",
    severity="error",
    title="The checkpoint's quantization is the one that was planned",
    why="Memory and the MoE back end were planned for that quantization, and not every GPU can run every quantization.",
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
    title="Every shard that the index names is there",
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
    title="Every shard holds the tensors that the index lists for it",
    why="The weights belong to another checkpoint, or are not complete. The load fails or, worse, does not fail.",
    source="model.safetensors.index.json, as transformers writes it",
)
STRAY_SHARD = CheckCode(
    code="W012",
    severity="warning",
    title="Every *.safetensors file in the folder is in the index",
    why="TensorRT-LLM loads every such file in the folder, whatever the index says.",
    source="TensorRT-LLM, weight_loader.py",
)
UNLISTED_TENSORS = CheckCode(
    code="W013",
    severity="warning",
    title="Every tensor of a shard is in the index, under that shard",
    why="The shard and the index belong to different checkpoints. When two shards hold a tensor, the one that is read "
    "last counts.",
    source="TensorRT-LLM, weight_loader.py",
)

CHECKS = tuple(sorted((value for value in globals().values() if isinstance(value, CheckCode)), key=lambda c: c.code))
"""All codes of this file, sorted."""
