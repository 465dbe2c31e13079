"""What our own code takes of a step at many requests at once: ``make_request`` and ``run_step`` without vLLM's part.

    python benchmarks/overhead.py --model DIR --requests 256

Time is taken around every call that goes from us into vLLM's scheduler and executor; what is left of ``make_request``
and ``run_step`` is ours. It depends on the processor and on the number of requests, and not on the model: for a GPU
compare it with the length of a step there. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import vllm_compat

SCHEDULER = ("add_request", "schedule", "get_grammar_bitmask", "update_from_output", "has_requests")
EXECUTOR = ("execute_model", "sample_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--requests", type=int, default=256, help="at once (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer, a step each (%(default)s)")
    parser.add_argument("--options", type=json.loads, default={}, help="fields of EngineArgs, as JSON")
    print(json.dumps(measure(parser.parse_args())), flush=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    length = arguments.prompt + arguments.answer + 1
    options = {"max_model_len": length, "max_num_seqs": arguments.requests, **arguments.options}
    with vllm_compat.open_engine(arguments.model, **options) as engine:
        inside = [0.0]
        target: Any = engine
        for owner, names in ((target._scheduler, SCHEDULER), (target._executor, EXECUTOR)):
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, timed(getattr(owner, name), inside))
        for _ in range(2):  # the first run warms up
            found = run(engine, arguments, inside)
    return {"vllm": str(vllm_compat.detect().version), "requests": arguments.requests, **found}


def timed(call: Callable[..., Any], inside: list[float]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            inside[0] += time.perf_counter() - start

    return wrapper


def run(engine: vllm_compat.Engine, arguments: argparse.Namespace, inside: list[float]) -> dict[str, Any]:
    rng = random.Random(0)
    prompts = [rng.choices(range(3, engine.vocab_size), k=arguments.prompt) for _ in range(arguments.requests)]
    inside[0], start = 0.0, time.perf_counter()
    for token_ids in prompts:
        engine.make_request(token_ids, max_tokens=arguments.answer, ignore_eos=True)
    making = time.perf_counter() - start - inside[0]
    steps: list[float] = []
    whole: list[float] = []
    while engine.has_unfinished:
        inside[0], start = 0.0, time.perf_counter()
        engine.run_step()
        whole.append(time.perf_counter() - start)
        steps.append(whole[-1] - inside[0])
    engine.get_captured_states()
    steps.sort()
    whole.sort()
    return {
        "steps": len(steps),
        "ours_us_per_step": {"median": round(steps[len(steps) // 2] * 1e6, 1), "max": round(steps[-1] * 1e6, 1)},
        "ours_us_per_request": round(making / len(prompts) * 1e6, 1),
        "whole_step_us": round(whole[len(whole) // 2] * 1e6, 1),
    }


if __name__ == "__main__":
    main()
