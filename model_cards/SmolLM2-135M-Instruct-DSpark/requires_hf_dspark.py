"""Loads this DSpark drafter with the package that it was made with."""

try:
    from hf_dspark import DSparkConfig, DSparkModel
except ModuleNotFoundError as error:
    if error.name != "hf_dspark":
        raise
    raise ImportError("This model is a DSpark drafter. To load it, run `pip install hf-dspark`.") from None

__all__ = ["DSparkConfig", "DSparkModel"]
