"""`check`: compare a repository with what is known about releases, GPUs and models.

The repository may be generated, upstream's own or edited by hand.

    report = check_repository(Path("repository"), CheckOptions(gpu="h200"))

All problems are found at once, each with its file, line and fix. Nothing in the repository is imported or run. The
readers of YAML, stamps and checkpoints that the check uses are public too, for tools that read a repository.
"""

from typing import TYPE_CHECKING

from deepseek_triton_build import lazy_names

if TYPE_CHECKING:
    from deepseek_triton_build.check.checkpoint_files import CheckpointFacts, read_facts
    from deepseek_triton_build.check.codes import CHECKS, INCOMPLETE, MISSING_SHARD, NO_MODEL_HERE
    from deepseek_triton_build.check.deepseek_v4 import draft_kind, is_v4
    from deepseek_triton_build.check.documents import read_bytes, read_yaml
    from deepseek_triton_build.check.finding import CheckedModel, Report, find_code, rules_page
    from deepseek_triton_build.check.generated_origin import STAMP_FIX, Stamp, changed_files, read_stamp
    from deepseek_triton_build.check.model_identity import CheckOptions
    from deepseek_triton_build.check.published_recipe import read_recipe
    from deepseek_triton_build.check.repository_report import check_repository
    from deepseek_triton_build.check.safetensors import Header, HeaderEntry, HeaderError, read_header
    from deepseek_triton_build.check.scripts import served_model
    from deepseek_triton_build.check.weights import INDEX, check_weights, files_read, instead_of_checkpoint
    from deepseek_triton_build.data.finding import Finding
    from deepseek_triton_build.planning.plan_request import read_json_object
    from deepseek_triton_build.render.stamp import MANIFEST
    from deepseek_triton_build.text import is_inside

# Whoever reads a header needs no rules, which take most of the time.
__all__, __getattr__ = lazy_names(__name__, __file__)
