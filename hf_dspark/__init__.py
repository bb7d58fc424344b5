"""DSpark speculative decoding for transformers: importing this package teaches `generate()` about DSpark drafters."""

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .generation.hook import install, uninstall
from .generation.trace import Round, acceptance_length, trace
from .modeling_dspark import DSparkModel
from .scheduling.profile import HardwareProfile
from .version import __version__

__all__ = [
    "DSparkConfig",
    "DSparkModel",
    "HardwareProfile",
    "Round",
    "__version__",
    "acceptance_length",
    "install",
    "trace",
    "uninstall",
]

AutoConfig.register("dspark", DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkModel, exist_ok=True)
install()
