"""Extraction of hidden states to files, for training EAGLE-3 draft models: ``python -m vllm_compat.extract``.

The same from Python is ``extract(ExtractConfig(...))``, and ``stream`` yields samples without files. Nothing here knows
vLLM: it drives an ``Engine``, and importing it imports neither torch nor vLLM.
"""

from __future__ import annotations

from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.record import Summary
from vllm_compat.extract.run import extract
from vllm_compat.extract.stop import Stop
from vllm_compat.extract.stream import stream

__all__ = ["ExtractConfig", "Sample", "Stop", "Summary", "extract", "stream"]
