"""For people whose code drives speculators 0.3.0 to 0.4.0.1: its generator of hidden states, on any vLLM.

``VllmHiddenStatesGenerator`` takes the place of the class of that name;
``python -m vllm_compat.speculators run SCRIPT ARGS...`` puts it there for one run of a script that knows nothing of it.
See docs/speculators.md.
"""

from __future__ import annotations

from vllm_compat.speculators.generator import VllmHiddenStatesGenerator

__all__ = ["VllmHiddenStatesGenerator"]
