"""Costs of a round on a GPU that nobody measured, from its public figures: a fallback that says what it is."""

from __future__ import annotations

from dataclasses import dataclass

from .profile import DraftCell, Entry, Identity, Timing, VerifyCell


@dataclass(frozen=True)
class GPU:
    """
    Args:
        bandwidth: of its memory, bytes a second.
        flops: dense 16-bit floating point operations a second.
    """

    bandwidth: float
    flops: float


# Peak figures from the vendor's data sheets, by the name that torch gives the device.
GPUS = {
    "NVIDIA B200": GPU(8.0e12, 2250e12),
    "NVIDIA H200": GPU(4.8e12, 989e12),
    "NVIDIA H100 80GB HBM3": GPU(3.35e12, 989e12),
    "NVIDIA H100 PCIe": GPU(2.0e12, 756e12),
    "NVIDIA A100-SXM4-80GB": GPU(2.039e12, 312e12),
    "NVIDIA A100-SXM4-40GB": GPU(1.555e12, 312e12),
    "NVIDIA L40S": GPU(0.864e12, 362e12),
    "NVIDIA L4": GPU(0.3e12, 121e12),
    "NVIDIA A10G": GPU(0.6e12, 70e12),
    "Tesla T4": GPU(0.32e12, 65e12),
    "NVIDIA GeForce RTX 4090": GPU(1.008e12, 165e12),
    "NVIDIA GeForce RTX 3090": GPU(0.936e12, 71e12),
}


def estimate(identity: Identity, target_bytes: int, drafter_bytes: int, num_draft_tokens: int) -> Entry | None:
    """
    An entry from weights' bytes over bandwidth or FLOPs over peak, whichever is longer; marked `estimated`. It knows
    nothing of caches, launches and Python, so true times are longer.

    Args:
        identity: names the GPU.
        target_bytes, drafter_bytes: size of the weights that a pass reads.
        num_draft_tokens: γ.

    Returns:
        `None` for a device or dtype without figures.
    """
    gpu = GPUS.get(identity.device)
    if gpu is None or identity.dtype not in ("bfloat16", "float16"):
        return None

    def time(weights: int, tokens: int) -> Timing:
        parameters = weights / 2
        seconds = max(weights / gpu.bandwidth, 2 * parameters * tokens / gpu.flops)
        return Timing(seconds, seconds, seconds, count=0)

    widths = range(1, num_draft_tokens + 2)
    return Entry(
        identity,
        verify=[VerifyCell(rows=1, tokens=width, depth=0, time=time(target_bytes, width)) for width in widths],
        draft=[DraftCell(rows=1, time=time(drafter_bytes, num_draft_tokens))],
        overhead=Timing(0.0, 0.0, 0.0, count=0),
        estimated=True,
    )
