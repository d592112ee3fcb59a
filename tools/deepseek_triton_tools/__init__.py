"""The tools, and the `deepseek-triton` command line in cli/."""

from deepseek_triton_tools._version import __version__

__all__ = ["__version__"]
