"""The codes of every finding of `check` that is not about a rule.

The letter says what a finding is about. S: files (up to S009) and LLM arguments. T: triton_config (up to T009), GPUs
and their memory. C: config.pbtxt. W: the checkpoint.
"""

from __future__ import annotations

from functools import partial

from deepseek_triton_build.check.finding import CheckCode

_MODEL_CONFIGURATION = "Triton Inference Server docs/user_guide/model_configuration.md"
_NAME_AND_BACKEND = f"{_MODEL_CONFIGURATION}, Name, Platform and Backend"
_OUR_BACKEND = "this project's backend: docs/configuration.md"
_LLM_ARGS = (
    "tensorrt_llm/llmapi/llm_args.py of the release, or vllm/engine/arg_utils.py of the version, as its record here "
    "has it"
)
_LLM_MODEL = "tensorrt_llm.LLM: model is a folder or a Hugging Face name"
_LLMAPI = "triton-inference-server/tensorrtllm_backend docs/llmapi.md"
_DEEPSEEK = "config.json of deepseek-ai/DeepSeek-V3 and deepseek-ai/DeepSeek-V3.2"
_SAFETENSORS = "the safetensors format, https://docs.rs/crate/safetensors"
_INDEX = "model.safetensors.index.json, as transformers writes it"

_error, _warning, _note = partial(CheckCode, "error"), partial(CheckCode, "warning"), partial(CheckCode, "note")

UNREADABLE = _error(
    "S001",
    "Every file that is needed can be read",
    "tritonserver can't read such a file either, so the model does not load.",
    _MODEL_CONFIGURATION,
)
BROKEN = _error(
    "S002",
    "YAML files contain valid YAML, and JSON files contain valid JSON",
    "The load stops where the file can't be parsed.",
    "PyYAML's safe loader, which both upstream's model.py and this project's backend use",
)
NOT_A_MAPPING = _error(
    "S003", "model.yaml is a mapping of LLM arguments", "Its keys are passed to the engine as arguments.", _OUR_BACKEND
)
DUPLICATE_KEY = _error(
    "S004",
    "No key is given twice",
    "PyYAML takes the last one without a warning, so the value further up has no effect.",
    "the behaviour of PyYAML's safe loader",
)
CHANGED = _note(
    "S005",
    "The files are as they were generated",
    "An edit by hand is fine. `build` replaces an edited file only with --force.",
    "deepseek-triton.json, the stamp of the generated repository",
)
MISSING_FILE = _error(
    "S008",
    "Every file of the model is there",
    "Without model.py or a module that it imports, the model does not load; without its script, nothing starts it.",
    "deepseek-triton.json, the stamp of the generated repository; Triton's Python backend, which runs model.py",
)
CHANGED_PROGRAM = _warning(
    "S009",
    "The backend's own program is as it was generated",
    "A change by hand may break the backend, and `build` replaces it without a word about what it did.",
    "deepseek-triton.json, the stamp of the generated repository",
)
BROKEN_SCRIPT = _error(
    "S010", "bash can read the scripts", "A script with an error in its syntax stops there.", "bash -n"
)
BAD_RECORD = _warning(
    "S006",
    "The release, the variant and the GPU that the repository names are known here",
    "What is not known here is not used, and the repository is checked against the defaults.",
    "deepseek-triton.json and release.yaml of the generated repository",
)
RELEASE_ASSUMED = _note(
    "S007",
    "The release of TensorRT-LLM, or the version of vLLM, is known",
    "Keys differ from release to release. --trtllm or --vllm names the one to check against.",
    _LLM_ARGS,
)

WRONG_KEY = _error(
    "S011", "Every key is an LLM argument of the release", "The engine refuses unknown arguments.", _LLM_ARGS
)
UNKNOWN_KEY = _warning(
    "S012",
    "Every key is known here",
    "Not every key of this section is recorded here, so the key may exist. If it does not, the engine refuses it.",
    _LLM_ARGS,
)
MOVED_KEY = _error(
    "S013",
    "Every key is in the place where the release has it",
    "Keys of another release are refused or, worse, ignored.",
    "the release notes and llm_args.py of both releases, as data/spelling.yaml here has them; for vLLM "
    "vllm/moved_arguments.yaml",
)
WRONG_TYPE = _error(
    "S014", "Every value has its argument's type", "The engine validates its arguments and stops the load.", _LLM_ARGS
)
WRONG_CHOICE = _error(
    "S015",
    "Every value is one that its argument takes",
    "The engine validates its arguments and stops the load.",
    _LLM_ARGS,
)
OUT_OF_RANGE = _error(
    "S016",
    "Every number is in the range that makes sense for its argument",
    "An engine needs at least one GPU and one token, and can't use more than all of the memory.",
    "tensorrt_llm/llmapi/llm_args.py; vllm/config; the meaning of the arguments",
)
WRONG_NULL = _error(
    "S017", "Only optional arguments are null", "The engine validates its arguments and stops the load.", _LLM_ARGS
)
NOT_A_SECTION = _error(
    "S018", "A section has its keys below it", "The engine validates its arguments and stops the load.", _LLM_ARGS
)
NOT_LOOKED_INTO = _note(
    "S019",
    "Every section is of a kind that is recorded here",
    "Only MTP and DeepSeek sparse attention are recorded. Other kinds are not used with DeepSeek, and their keys "
    "are not checked.",
    _LLM_ARGS,
)
MODEL_MISSING = _error("S020", "model.yaml names the model", "Without a model, there is nothing to load.", _LLM_ARGS)
IGNORED_KEY = _warning(
    "S021",
    "Every key does something",
    "The sections of release 0.21 ignore keys that they don't know. The engines reference and simulated take only "
    "`model`, whatever the release.",
    _LLM_ARGS,
)

WRONG_FLAG = _error(
    "S022",
    "Every flag in a script is one that its program has",
    "The program refuses a flag that it doesn't know.",
    "the flags of TensorRT-LLM's programs, as data/spelling.yaml here has them; those of `vllm serve`, as the "
    "version's record has them",
)
UNUSED_FLAG = _warning(
    "S023",
    "No flag says something else than the YAML file",
    "A key of the YAML file wins over a flag, and a section wins over all flags about it, so the flag has no effect.",
    "TensorRT-LLM tensorrt_llm/llmapi/llm_args.py, update_llm_args_with_extra_dict",
)
UNUSED_ARGUMENTS = _error(
    "S024",
    "The script passes the YAML file to its program",
    "Otherwise nothing in the file has an effect.",
    "trtllm-serve, trtllm-bench and trtllm-eval, --extra_llm_api_options",
)
MISSPELLED_VARIABLE = _warning(
    "S025",
    "Every exported variable is spelled as the engine reads it",
    "A variable with another name has no effect, and nothing says so.",
    "the variables of TensorRT-LLM, PyTorch and NCCL, as environment_variables.yaml here has them",
)
WRONG_VARIABLE = _warning(
    "S026",
    "Every exported variable has a value that the engine understands",
    "The engine takes any other value for the default, and nothing says so.",
    "the variables of TensorRT-LLM, PyTorch and NCCL, as environment_variables.yaml here has them",
)
OBSOLETE_VARIABLE = _warning(
    "S028",
    "Every VLLM_* variable is one that the version of vLLM reads",
    "vLLM warns of any other once, among its first lines, and goes on without its effect.",
    "vllm/envs.py of the version, as its record here has it; vllm/replaced_environment.yaml",
)
OTHER_RECORD = _error(
    "S029",
    "release.yaml is the record of the engine that model.yaml names",
    "The backend refuses to load: it reads what the engine can do from this file.",
    "this project's backend: docs/configuration.md",
)
REFUSED_BY_ENGINE = _error(
    "S027",
    "TensorRT-LLM's own TorchLlmArgs takes the arguments",
    "The engine does not load. This is asked only where tensorrt_llm can be imported, as in its container.",
    "TorchLlmArgs and update_llm_args_with_extra_dict of the installed release",
)

WRONG_SETTING = _error(
    "T001", "Every key of triton_config is one of the backend's", "The backend refuses to load.", _OUR_BACKEND
)
WRONG_SETTING_VALUE = _error(
    "T002", "Every value of triton_config is one the backend takes", "The backend refuses to load.", _OUR_BACKEND
)

NO_PROTOBUF = _note(
    "C001",
    "Triton's protobuf messages are installed on this machine",
    "config.pbtxt is read with them. Without them it is not checked.",
    "tritonclient",
)
NO_CONFIG = _error(
    "C002",
    "The model has a config.pbtxt",
    "It declares the inputs and outputs, without which Triton does not load the model.",
    _MODEL_CONFIGURATION,
)
BROKEN_CONFIG = _error("C003", "config.pbtxt is a ModelConfig", "Triton does not load the model.", _MODEL_CONFIGURATION)
WRONG_NAME = _error(
    "C004", "The model has the name of its folder", "Triton does not load the model.", _NAME_AND_BACKEND
)
WRONG_BACKEND = _error(
    "C005", "The model runs on Triton's Python backend", "model.py runs on no other backend.", _NAME_AND_BACKEND
)
POLICY_DIFFERS = _error(
    "C006",
    "config.pbtxt and model.yaml agree on decoupled and max_batch_size",
    "config.pbtxt decides. Where the two differ, model.py sends more or fewer responses than Triton expects.",
    f"{_MODEL_CONFIGURATION}, Model Transaction Policy; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
POLICY_ONLY_COMPLETED = _warning(
    "C007",
    "config.pbtxt itself says what model.yaml asks for",
    "TensorRT-LLM's own model.py adds it to the configuration only while Triton completes the configuration "
    "(auto-complete), and --disable-auto-complete-config turns that off.",
    f"{_MODEL_CONFIGURATION}, Auto-Generated Model Configuration; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
WRONG_VLLM_BACKEND = _error(
    "C010",
    "A model.json belongs to a model of Triton's vLLM backend, decoupled, whose instances are KIND_MODEL",
    "Triton's vLLM backend alone reads model.json. It refuses a model that is not decoupled, and KIND_GPU with several "
    "GPUs.",
    "triton-inference-server/vllm_backend src/model.py@c70d654, _init_engine_args and _validate_device_config",
)
MISSING_TENSOR = _error(
    "C008",
    "config.pbtxt declares every tensor of the wire contract once, with its type, its shape and whether it is optional",
    "A request with a tensor that config.pbtxt does not declare, or declares differently, is refused. A "
    "response with such a tensor fails. An input that is not optional has to be in every request.",
    "docs/contract.md",
)
EXTRA_TENSOR = _warning(
    "C009",
    "config.pbtxt declares no other tensors",
    "The backend refuses an input that it doesn't know, and never sends an output that it doesn't know.",
    "docs/contract.md",
)

NO_GPUS = _error(
    "T011",
    "Each of several instances has GPUs of its own",
    "Otherwise all instances take the same GPUs, and the second one runs out of memory.",
    _LLMAPI,
)
GPUS_SHARED = _error("T012", "No GPU is given twice", "Two ranks on one GPU run out of memory.", _LLMAPI)
TOO_FEW_GPUS = _error(
    "T013",
    "An instance has as many GPUs as ranks",
    "The number of ranks is tensor x pipeline parallelism, and each rank needs a GPU.",
    _LLMAPI,
)
IDLE_GPUS = _warning("T014", "Every GPU of an instance has a rank", "A GPU without a rank stays idle.", _LLMAPI)
WRONG_KIND = _warning(
    "T015",
    "Instances are KIND_CPU",
    "The engine takes the GPUs by itself. With KIND_GPU, or without a kind, Triton makes one instance for every "
    "GPU, and each of them would load the model.",
    f"{_MODEL_CONFIGURATION}, Instance Groups; NVIDIA/TensorRT-LLM llmapi config.pbtxt",
)
WEIGHTS_TOO_LARGE = _error(
    "T016",
    "The weights fit the GPUs",
    "The load runs out of memory, often after most of an hour.",
    "the shapes of the model and how its weights are stored; docs/generator.md, Memory",
)
NO_ROOM_FOR_CACHE = _warning(
    "T017",
    "There is room for a KV cache",
    "The memory left for the cache may hold no request of 8,192 tokens, or nothing at all. Weights are exact, "
    "workspace is estimated.",
    "the plan's own arithmetic; docs/generator.md, Memory",
)

MODEL_NOT_HERE = _warning(
    "W001",
    "The checkpoint's folder is here",
    "It may be at that path inside the container. Here its files are not checked.",
    _LLM_MODEL,
)
MODEL_GONE = _error("W002", "With --strict, the checkpoint's folder is on this machine", "The load fails.", _LLM_MODEL)
MODEL_ON_HUB = _note(
    "W003",
    "The checkpoint is a folder",
    "A checkpoint with a Hugging Face name is downloaded at the first load. Nothing is looked up here.",
    _LLM_MODEL,
)
WRONG_ARCHITECTURE = _error(
    "W004",
    "The checkpoint belongs to the variant that the repository was generated for",
    "Memory, parallelism and sparse attention were planned for another model.",
    _DEEPSEEK,
)
UNKNOWN_ARCHITECTURE = _warning(
    "W005",
    "The checkpoint is a DeepSeek-V3, R1 or V3.2",
    "Rules and memory are known for these only. Other models are not checked against them.",
    _DEEPSEEK,
)
WRONG_PRECISION = _error(
    "W006",
    "The checkpoint's quantization is the one that was planned",
    "Memory and the MoE back end were planned for that quantization, and not every GPU can run every quantization.",
    "hf_quant_config.json of NVIDIA's checkpoints, quantization_config of DeepSeek's",
)
NO_WEIGHTS = _error("W007", "The checkpoint holds weights", "The load fails.", _SAFETENSORS)
MISSING_SHARD = _error(
    "W008", "Every shard that the index names is there", "The load fails, often after most of an hour.", _INDEX
)
BROKEN_SHARD = _error(
    "W009",
    "Every shard is a file with a readable header, in which shapes, offsets and types agree",
    "The load fails, often after most of an hour.",
    _SAFETENSORS,
)
WRONG_LENGTH = _error(
    "W010",
    "Every shard is as long as its header says",
    "A download that broke off leaves a shorter file; the load fails, often after most of an hour.",
    _SAFETENSORS,
)
MISSING_TENSORS = _error(
    "W011",
    "Every shard holds the tensors that the index lists for it",
    "The weights belong to another checkpoint, or are not complete. The load fails or, worse, does not fail.",
    _INDEX,
)
STRAY_SHARD = _warning(
    "W012",
    "Every *.safetensors file in the folder is in the index",
    "TensorRT-LLM loads every such file in the folder, whatever the index says.",
    "TensorRT-LLM, weight_loader.py",
)
UNLISTED_TENSORS = _warning(
    "W013",
    "Every tensor of a shard is in the index, under that shard",
    "The shard and the index belong to different checkpoints. When two shards hold a tensor, the one that is read "
    "last counts.",
    "TensorRT-LLM, weight_loader.py",
)

NO_TOKENIZER = _error(
    "W014",
    "The tokenizer's files are there",
    "Without tokenizer.json and tokenizer_config.json, the engine can read no text.",
    "the files of deepseek-ai/DeepSeek-V3",
)
WRONG_TOKENIZER = _error(
    "W015",
    "The tokenizer is the model's own",
    "Another tokenizer's ids stand for other words, or for none: the answers are noise.",
    "tokenizer.json and config.json of deepseek-ai/DeepSeek-V3",
)
WRONG_SHAPE = _error(
    "W016",
    "config.json has the figures of the model",
    "The weights don't fit other figures: the load fails or, with layers left out, the answers are noise.",
    _DEEPSEEK,
)
NO_MTP_LAYER = _error(
    "W017",
    "With MTP, config.json names the MTP layer",
    "The engine reads num_nextn_predict_layers to find the draft layer, and does not load without it.",
    "config.json of deepseek-ai/DeepSeek-V3; TensorRT-LLM tensorrt_llm/_torch/models/modeling_deepseekv3.py",
)
WRONG_QUANT_CONFIG = _error(
    "W018",
    "hf_quant_config.json has the keys and values that TensorRT-LLM reads",
    "A key with another name is ignored, so the weights are taken for something else; an unknown value stops the load.",
    "TensorRT-LLM tensorrt_llm/_torch/model_config.py, load_modelopt_quant_config; tensorrt_llm/quantization/mode.py",
)
OTHER_FOLDER = _warning(
    "W019",
    "A folder with the name of a published checkpoint holds what was planned",
    "Another model's chat template and sampling don't fit, and other weights need other memory.",
    "the names of the published checkpoints, as variants.yaml here has them",
)
CHANGED_CHECKPOINT = _error(
    "W020",
    "A checkpoint that travels in the repository is the one that was generated",
    "Engines that compare no checksums load other weights, and answer nonsense without an error.",
    "deepseek-triton.json, the stamp of the generated repository",
)
CUT_CHECKPOINT = _warning(
    "W021",
    "The checkpoint has all layers and experts of the model",
    "A cut one tests hardware and settings in little memory and time. Its answers are noise.",
    "`deepseek-triton checkpoint cut`",
)

CHECKS = tuple(sorted((value for value in globals().values() if isinstance(value, CheckCode)), key=lambda c: c.code))
"""All codes of this file, sorted."""
