"""vLLM's own prefill, by its own ``LLM``: the measure of the others."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.bench.cases.base import Figures, Work
from benchmarks.bench.settings import Settings

__all__ = ["compiled", "eager"]


def eager(settings: Settings, work: Work) -> Figures:
    return _run(settings, work, enforce_eager=True)


def compiled(settings: Settings, work: Work) -> Figures:
    """With all that vLLM does for speed by default: torch.compile, and CUDA graphs where there are any."""
    return _run(settings, work, enforce_eager=False)


def _run(settings: Settings, work: Work, *, enforce_eager: bool) -> Figures:
    begun = time.perf_counter()
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"skip_tokenizer_init": True, **settings.engine(), "enforce_eager": enforce_eager}
    llm = LLM(model=settings.model, **options)
    load = time.perf_counter() - begun
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> list[Any]:
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        return list(llm.generate(asked, sampling, use_tqdm=False))

    generate(work.warmup)
    start = time.perf_counter()
    outputs = generate(work.prompts)
    seconds = time.perf_counter() - start
    if [list(output.prompt_token_ids) for output in outputs] != work.prompts:
        raise RuntimeError(f"{len(outputs)} outputs, which are not of the {len(work.prompts)} prompts")
    return Figures(settings.tokens, seconds, load)
