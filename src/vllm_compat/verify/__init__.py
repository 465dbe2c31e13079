"""Proof that a run's output is right: ``python -m vllm_compat verify DIR``.

The scan reads everything that was written and compares it with the journals and the input; the self-check compares the
last states with the tokens that vLLM sampled; with a model, samples are computed again by HF transformers. Nothing in a
run's folder is changed, and importing this imports neither torch nor vLLM.

The same from Python is ``verify(VerifyConfig(...))``.
"""

from __future__ import annotations

from vllm_compat.verify.config import VerifyConfig
from vllm_compat.verify.problems import Problem
from vllm_compat.verify.prove import verify
from vllm_compat.verify.verdict import Verdict

__all__ = ["Problem", "Verdict", "VerifyConfig", "verify"]
