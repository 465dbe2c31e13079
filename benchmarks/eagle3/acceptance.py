"""How many of an EAGLE-3 head's drafts a model accepts, by vLLM's own counters, on prompts it was not trained on.

    python benchmarks/eagle3/acceptance.py --model DIR --prompts FILE --out FILE --head NAME=DIR ...

The model answers the prompts alone first, and then with each head; answers are greedy. Where an answer with a head
differs from that of the model alone, the place of its first other token is written, and how far apart the two tokens
were for the model alone: a tie that rounding decides is no fault of the head.

Each engine is vLLM's own `LLM`, one after the other in this process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_at",
}
NEAREST = 5  # the likeliest tokens that are kept at each place


@dataclass(frozen=True)
class Answers:
    """Greedy answers to all prompts.

    Attributes:
        tokens: of each answer.
        nearest: at each of its places the log-probabilities of the likeliest tokens; empty with a head.
    """

    tokens: list[list[int]]
    nearest: list[list[dict[int, float]]]


@dataclass(frozen=True)
class Difference:
    """The first token in which an answer differs from that of the model alone.

    Attributes:
        prompt: the prompt's place in its file.
        place: the token's place in the answer.
        alone: the token of the model alone; None where its answer ended.
        with_head: the token with speculation, likewise.
        gap: by how much the model alone preferred its token, in log-probability; None where the other one was not
            among the ``NEAREST``.
    """

    prompt: int
    place: int
    alone: int | None
    with_head: int | None
    gap: float | None


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines in this process: vLLM is imported once
    arguments = parse()
    prompts = [json.loads(line)["messages"] for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    llm = build(arguments, None)
    alone = answer(llm, prompts, arguments.max_tokens, NEAREST)
    del llm
    result: dict[str, Any] = {
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "batch_size": arguments.batch_size,
        "prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "tokens": sum(map(len, alone.tokens)),
        "speculative_tokens": arguments.speculative_tokens,
        "heads": {},
    }
    for name, head in arguments.head:
        tear_down()
        llm = build(arguments, head)
        found = answer(llm, prompts, arguments.max_tokens, None)
        differences = compare(alone, found)
        result["heads"][name] = {
            "layer_ids_served": served_layer_ids(llm),
            **counters(llm),
            "same_answers": len(prompts) - len(differences),
            "differences": [asdict(difference) for difference in differences],
        }
        del llm
        print(name, json.dumps(result["heads"][name]), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the target model")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSONL with `messages`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the result goes, as JSON")
    parser.add_argument("--head", type=named, action="append", required=True, metavar="NAME=DIR", help="repeatable")
    parser.add_argument("--speculative-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--batch-size", type=int, default=8, help="the most prompts under way at once")
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args()


def named(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, Path(folder)


def build(arguments: argparse.Namespace, head: Path | None) -> Any:
    """vLLM's own engine, eager, with the head or without."""
    from vllm import LLM

    speculation = {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": arguments.speculative_tokens,
    }
    return LLM(
        model=str(arguments.model),
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=arguments.batch_size,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation if head else None,
    )


def tear_down() -> None:
    """Make room for another engine in this process; its counters begin at zero by themselves."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def answer(llm: Any, prompts: Sequence[Any], max_tokens: int, nearest: int | None) -> Answers:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=nearest)
    outputs = [request.outputs[0] for request in llm.chat(list(prompts), sampling, use_tqdm=False)]
    return Answers(
        tokens=[list(output.token_ids) for output in outputs],
        nearest=[
            [{token: entry.logprob for token, entry in place.items()} for place in output.logprobs or []]
            for output in outputs
        ],
    )


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters of speculative decoding, and what follows from them."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if name := COUNTERS.get(metric.name):
            found[name] = getattr(metric, "values", None) or metric.value
    return found | {
        "acceptance_length": round(1 + found["accepted"] / found["drafts"], 4),
        "acceptance_at": [round(count / found["drafts"], 4) for count in found["accepted_at"]],
    }


def served_layer_ids(llm: Any) -> list[int]:
    """The ids by which the target model really hands out its states, in vLLM's convention."""
    return [int(k) for k in llm.apply_model(auxiliary_layers)[0]]


def auxiliary_layers(model: Any) -> tuple[int, ...]:
    ids: tuple[int, ...] = model.model.aux_hidden_state_layers
    return ids


def compare(alone: Answers, found: Answers) -> list[Difference]:
    """Where answers differ from those of the model alone."""
    differences = []
    for prompt, (ours, theirs) in enumerate(zip(alone.tokens, found.tokens, strict=True)):
        if ours == theirs:
            continue
        apart = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        place = next(apart, min(len(ours), len(theirs)))
        token = ours[place] if place < len(ours) else None
        other = theirs[place] if place < len(theirs) else None
        near = alone.nearest[prompt][place] if token is not None else {}
        gap = round(near[token] - near[other], 4) if token in near and other in near else None
        differences.append(Difference(prompt, place, token, other, gap))
    return differences


if __name__ == "__main__":
    main()
