"""``generate``: the model answers the prompts itself, and the states of prompt and answer are of that same pass."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm_compat.errors import CaptureError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.inputs import Sample
from vllm_compat.types import CapturedStates

__all__ = ["answered", "request_options"]


def request_options(config: ExtractConfig, sample: Sample, *, max_model_len: int) -> dict[str, Any]:
    """What ``make_request`` is told beside the prompt; nothing where no answer is wanted.

    A seed is that of the first sample: each has its own, whatever is sampled beside it or was before.
    """
    if not config.generate:
        return {}
    sampling = dict(config.sampling)
    if "seed" in sampling:
        sampling["seed"] += sample.index
    return {"max_tokens": min(config.generate, max_model_len - len(sample.token_ids)), "sampling": sampling}


def answered(sample: Sample, states: CapturedStates) -> Sample:
    """The sample with the model's answer: its loss mask is 0 on the prompt and 1 on the answer.

    Of the tokens sampled the last one is missing, for it was never forwarded and has no state.

    Raises:
        CaptureError: the states are of another prompt, or not of what was sampled after it.
    """
    prompt, answer = sample.token_ids, states.output_token_ids[:-1]
    if states.token_ids != prompt + answer or states.num_prompt_tokens != len(prompt):
        raise CaptureError(
            f"sample {sample.index} (line {sample.line}): the states are of {len(states.token_ids)} tokens that are "
            f"not its prompt of {len(prompt)} and the {len(answer)} that were sampled and forwarded. Nothing of this "
            "run is trustworthy."
        )
    mask = (0,) * len(prompt) + (1,) * len(answer)
    return dataclasses.replace(sample, token_ids=states.token_ids, loss_mask=mask)
