"""Processors with AMX, and a CPU build that chooses kernels for it which it does not have.

vLLM 0.16.0 asks the processor alone. Its wheel was built without those kernels, and every forward pass in bfloat16 ends
with "Unsupported CPU attention configuration: head_dim=64 isa=0". Blocks of another size than a multiple of 32 lead it
to kernels that are there. Goes when 0.16 does.
"""

from __future__ import annotations

from typing import Any

from vllm_compat.detection import Detection

__all__ = ["BLOCK_SIZE", "lacks_amx"]

BLOCK_SIZE = 16
_FAULT = "amx"


def lacks_amx(found: Detection, config: Any) -> bool:
    """Whether this configuration leads to kernels that are not there."""
    if found.release is None or _FAULT not in found.release.faults or config.device_config.device_type != "cpu":
        return False
    import torch

    asked: Any = getattr(torch._C._cpu, "_is_amx_tile_supported", None)  # what vLLM itself asks
    return config.model_config.dtype == torch.bfloat16 and asked is not None and bool(asked())
