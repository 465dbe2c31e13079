"""A finished run in another format, without a GPU: ``python -m vllm_compat convert RUN_DIR OUT_DIR --format F``.

The same from Python is ``convert(ConvertConfig(...))``. Importing this imports neither torch nor vLLM.
"""

from __future__ import annotations

from vllm_compat.convert.cli import main
from vllm_compat.convert.config import ConvertConfig
from vllm_compat.convert.run import convert

__all__ = ["ConvertConfig", "convert", "main"]
