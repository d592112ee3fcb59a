"""The tools and the `deepseek-triton` command line: one module for each verb, imported when the verb is used."""

from deepseek_triton_tools._version import __version__

__all__ = ["__version__"]
