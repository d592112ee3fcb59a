"""Code for containers that docker, Slurm and ssh-setup share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from deepseek_triton_tools.launching import kernel_caches
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts


def image_of(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Return the image's name; "" for an engine that was planned for no container."""
    return options.image or facts.image or ""


def too_few_gpus(facts: LaunchFacts, num_gpus: int) -> Iterator[str]:
    """Yield a reason to refuse: a rank without a GPU would fail only after the other ranks have loaded."""
    if num_gpus < facts.gpus_per_node:
        yield f"--gpus: {facts.source} takes {facts.gpus_per_node} GPUs of each node, got {num_gpus}"


def kernel_folder(facts: LaunchFacts, options: LaunchOptions) -> Path:
    """Return the folder on this machine in which compiled kernels are kept."""
    return kernel_caches.cache_folder(image_of(facts, options), facts.gpu, options.cache_dir)


def created_folders(facts: LaunchFacts, options: LaunchOptions) -> list[str]:
    """Return the folders that are mounted and that the rendered script creates if they don't exist."""
    folders = [str(kernel_folder(facts, options))]
    if facts.serving and facts.serving.names:
        folders.append(facts.serving.hub_cache)
    if options.ready_file:
        folders.append(os.path.dirname(os.path.abspath(options.ready_file)))
    return folders
