"""What each part may import from outside. The layers inside the packages are import-linter's: `make lint`."""

import sys
from functools import cache

import grimp
import pytest

OURS = (
    "deepseek_backend",
    "deepseek_launcher",
    "deepseek_triton_build",
    "deepseek_triton_client",
    "deepseek_triton_tools",
)


@cache
def graph():
    return grimp.build_graph(*OURS, include_external_packages=True, cache_dir=None)


def imported_by(folder):
    """Top-level packages that the modules in `folder` import, besides the folder itself and the standard library."""
    modules = {module for module in graph().modules if module == folder or module.startswith(f"{folder}.")}
    assert modules, f"no module is called {folder}"
    imported = {name for module in modules for name in graph().find_modules_directly_imported_by(module)}
    outside = {name.partition(".")[0] for name in imported - modules}
    return outside - sys.stdlib_module_names


ANSWERS = [
    "admission",
    "answer_format",
    "answer_text",
    "chat_rendering",
    "dsml_prompt",
    "field_reader",
    "messages",
    "parsing",
    "sequence_buffer",
    "v4_prompt",
]
WAYS_OUT = ["active_request", "delivery", "send_queue", "triton_process", "watcher"]
ALLOWED = {
    "deepseek_launcher": set(),  # it runs in a stock container
    "deepseek_triton_tools.host": {"deepseek_triton_tools"},  # doctor sends it to other hosts, with its checks
    "deepseek_triton_client._core": {"certifi", "deepseek_triton_client"},
    "deepseek_triton_client": {"certifi", "google", "grpc", "h11", "tritonclient"},
    # check asks the installed TensorRT-LLM for its opinion, in a process of its own.
    "deepseek_triton_build": {"google", "tensorrt_llm", "tritonclient", "yaml"},
    **{f"deepseek_backend.{name}": {"deepseek_backend", "numpy"} for name in ANSWERS},
    **{f"deepseek_backend.{name}": {"deepseek_backend"} for name in WAYS_OUT},
}


@pytest.mark.slow
def test_a_folder_imports_only_what_it_may():
    too_much = {folder: imported_by(folder) - allowed for folder, allowed in ALLOWED.items()}
    assert {folder: packages for folder, packages in too_much.items() if packages} == {}


@pytest.mark.slow
def test_what_doctor_sends_to_other_hosts_needs_nothing_else():
    """Every module that travels imports only modules that travel too."""
    from deepseek_triton_tools.doctor.hosts import SENT

    package = "deepseek_triton_tools"
    names = [name.removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".") for name in SENT]
    sent = {f"{package}.{name}".rstrip(".") for name in names}

    def travels(module):
        return module in sent or any(module.startswith(f"{name}.") for name in sent - {package, f"{package}.doctor"})

    lacking = {
        f"{module} -> {imported}"
        for module in graph().modules
        if travels(module)
        for imported in graph().find_modules_directly_imported_by(module)
        if imported.startswith(package) and not travels(imported)
    }
    assert lacking == set()
