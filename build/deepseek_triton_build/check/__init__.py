"""`check`: compare a repository with what is known about releases, GPUs and models.

The repository may be generated, upstream's own or edited by hand.

    report = check_repository(Path("repository"), CheckOptions(gpu="h200"))

All problems are found at once, each with its file, line and fix. Nothing in the repository is imported or run. The
readers of YAML, stamps and checkpoints that the check uses are public too, for tools that read a repository.
"""

from deepseek_triton_build.check.checkpoint_files import CheckpointFacts, read_facts
from deepseek_triton_build.check.codes import CHECKS, MISSING_SHARD, NO_MODEL_HERE
from deepseek_triton_build.check.deepseek_v4 import draft_kind, is_v4
from deepseek_triton_build.check.documents import is_inside, read_bytes, read_yaml
from deepseek_triton_build.check.finding import CheckedModel, Report, find_code, rules_page
from deepseek_triton_build.check.generated_origin import Stamp, read_stamp
from deepseek_triton_build.check.model_identity import CheckOptions
from deepseek_triton_build.check.published_recipe import read_recipe
from deepseek_triton_build.check.repository_report import check_repository
from deepseek_triton_build.check.safetensors import Header, HeaderEntry, HeaderError, read_header
from deepseek_triton_build.check.scripts import served_model
from deepseek_triton_build.check.weights import INDEX, check_weights, files_read, instead_of_checkpoint
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.planning.plan_request import read_json_object
from deepseek_triton_build.render.stamp import MANIFEST

__all__ = [
    "CHECKS",
    "INDEX",
    "MANIFEST",
    "MISSING_SHARD",
    "NO_MODEL_HERE",
    "CheckOptions",
    "CheckedModel",
    "CheckpointFacts",
    "Finding",
    "Header",
    "HeaderEntry",
    "HeaderError",
    "Report",
    "Stamp",
    "check_repository",
    "check_weights",
    "draft_kind",
    "files_read",
    "find_code",
    "instead_of_checkpoint",
    "is_inside",
    "is_v4",
    "read_bytes",
    "read_facts",
    "read_header",
    "read_json_object",
    "read_recipe",
    "read_stamp",
    "read_yaml",
    "rules_page",
    "served_model",
]
