"""The one place that holds the version: of the wheel, of `--version` and of the stamp in generated repositories."""

__version__ = "1.0.0"
