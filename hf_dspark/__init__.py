"""DSpark speculative decoding for transformers: importing this package teaches `generate()` about DSpark drafters."""

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkModel

from .version import __version__
__all__ = ["DSparkConfig", "DSparkModel"]

AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkModel, exist_ok=True)
