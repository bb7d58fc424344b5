"""Drafters that are known but not read, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .translation import Shapes, architectures, section

Test = Callable[[dict], bool]


def _called(*names: str) -> Test:
    return lambda config: any(name in architectures(config) for name in names)


@dataclass(frozen=True)
class Unsupported:
    """A format whose every checkpoint is refused."""

    NAME: str
    reason: str
    recognises: Test

    def tensor_name(self, name: str) -> str | None:
        return name

    def translate(self, config: dict, tensors: Shapes) -> dict:
        """
        Raises:
            ValueError: always.
        """
        raise ValueError(f"This is a {self.NAME} drafter, which hf_dspark does not read: {self.reason}.")


OTHER_DFLASH2 = Unsupported(
    "DFlash2 with MiniMax layers or beam search",
    "its layers, or what its selector does, are not those of DFlash2",
    _called("DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"),
)
NOISE_LEVEL = Unsupported(
    "noise-conditioned DSpark",
    "it is conditioned on a signal-to-noise ratio (`log_snr_conditioning`)",
    lambda config: bool(config.get("log_snr_conditioning")),
)
GATED_QUERIES = Unsupported(
    "Qwen3.5 DSpark",
    "its attention has gated queries, partial rotary embeddings and offset norms",
    lambda config: _called("Qwen35DSparkModel")(config) or bool(config.get("enable_qwen35_gated_q_proj")),
)
DOMINO = Unsupported(
    "Domino",
    "its head is a recurrent network over the prefix",
    lambda config: section(config, "dflash_config").get("projector_type") == "domino",
)
LAGUNA = Unsupported(
    "Laguna DFlash",
    "its attention is gated, and its context rows are normalised in each layer",
    _called("DFlashLagunaForCausalLM"),
)
LATENT_ATTENTION = Unsupported(
    "GLM-5.2, Kimi-K3 or DeepSeek DSpark",
    "its layers have multi-head latent attention",
    _called(
        *("Glm5_2DSparkModel", "KimiK3DSparkModel", "K3DSparkModel", "DeepseekV4DSparkModel"),
        *("DeepSeekDSparkModel", "DeepSeekV4DSparkModel"),
    ),
)
OTHER_LAYERS = Unsupported(
    "MiniMax-M3 or Muse-Spark DSpark",
    "its layers are those of its target",
    _called("MiniMaxM3DSparkModel", "DSparkMiniMaxDraftModel", "MuseSparkDSparkModel"),
)
DEEPSEEK_V4 = Unsupported(
    "DeepSeek-V4 DSpark",
    "it is bundled with its target and has latent attention and experts",
    lambda config: any(
        name in config
        for name in (*("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids"),)
    ),
)
