"""What capturing and extracting cost: prefill speed with taps against without, in one process, on one vLLM engine.

    python benchmarks/capture_gpu.py --model DIR --layers 2 30 58 60 --prompts 48 --length 2048 --budget 8192

The model needs a ``config.json`` and no weights. The ways take turns on the same engine, attached anew each time, in
the other order every second time, so that a drift of the clocks touches all alike:

- ``plain``: no taps;
- ``captured``: states are collected beside each step, their shapes checked, and dropped;
- ``checked``: the same, and the caller compares each token id and each tensor's place in its stack once more;
- ``waited``: states are waited for after each step, so that the device stands still meanwhile;
- ``extract``: the whole job under ``--output``, until every file and the journal are durable and the run is sealed.

Prints a JSON line for each run and one with the ratios to ``plain``, the median over the turns. ``tokens_per_second``
ends with the last step, that of ``extract`` with the seal; ``tail_seconds`` is from there to the last states, once in a
run however long it is. ``--compiled`` measures an engine that vLLM compiles, with all that it does for speed by
default, and nothing else: the faster of it and ``plain`` is vLLM's own best. With ``--disk`` what the disk under
``--output`` can take is measured last: files as large as a sample's, written by as many threads, each synced.
``peak_bytes`` is the most device memory that torch had allocated during the run on each rank, the model's own included;
``step_ms`` the median length of a step whose budget is full, ``between_ms`` what a step's successor waited on average.
``pass_ms`` is the median time of such a step's pass on each rank's device, from its call to its last kernel;
``gap_ms`` that from there to the next pass: sampling, and the way through the host. ``attach_seconds`` is what our own
start takes beside vLLM's; ``tokens_of_ranks`` what each rank captured. ``--head`` writes what ``verify`` needs of a
model of made-up weights for its self-check: config, final norm and ``lm_head``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import vllm_compat
from vllm_compat import CapturedStates, Engine, StepResult
from vllm_compat._stacked import stacked
from vllm_compat.extract import ExtractConfig, extract
from vllm_compat.extract.files import write_whole
from vllm_compat.extract.spent import Spent

WAYS = ("plain", "captured", "checked", "waited", "extract")


def main() -> None:
    arguments = parse()
    logging.basicConfig(stream=sys.stderr)
    logging.getLogger("vllm_compat").setLevel(logging.INFO)
    if arguments.compiled:  # in a process of its own: its memory would not all come back
        measure_compiled(arguments)
        return
    begun = time.perf_counter()
    core = build(arguments)
    print(json.dumps({"way": "load", "seconds": round(time.perf_counter() - begun, 2), **room(core)}), flush=True)
    try:
        measure(core, arguments)
        if arguments.head:
            write_head(core, Path(arguments.model), arguments.head)
    finally:
        core.shutdown()
    if arguments.disk:
        print(json.dumps(disk(arguments)), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a config.json")
    parser.add_argument("--layers", nargs="+", required=True, help="layer ids, or norm")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of one step")
    parser.add_argument("--turns", type=int, default=4, help="how often each way is measured")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["plain", "captured", "extract"])
    parser.add_argument("--batch-size", type=int, help="of extract: the most samples at once (default: all)")
    parser.add_argument("--head", type=Path, help="a folder for the model's config, final norm and lm_head")
    parser.add_argument("--writers", type=int, default=2, help="threads that write (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="a folder for the files of extract; each run's are removed")
    parser.add_argument("--compiled", action="store_true", help="measure vLLM's compiled prefill instead")
    parser.add_argument("--disk", action="store_true", help="measure what the disk takes, too")
    parser.add_argument("--options", type=json.loads, default={}, help="fields of EngineArgs, as JSON")
    return parser.parse_args()


def build(arguments: argparse.Namespace, *, enforce_eager: bool = True) -> Any:
    """vLLM's own EngineCore, as a caller of ``attach`` builds it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    options = {
        "model": arguments.model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": enforce_eager,
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "max_model_len": arguments.length + 1,
        "max_num_batched_tokens": arguments.budget,
        **arguments.options,
    }
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    config = EngineArgs(**{k: v for k, v in options.items() if k in known}).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    core.model_executor.collective_rpc(watch)
    return core


def measure_compiled(arguments: argparse.Namespace) -> None:
    core = build(arguments, enforce_eager=False)
    try:
        for turn in range(-1, arguments.turns):
            result = run(core, "plain", [], arguments)
            if turn >= 0:
                print(json.dumps({"turn": turn, **result, "way": "compiled"}), flush=True)
    finally:
        core.shutdown()


def measure(core: Any, arguments: argparse.Namespace) -> None:
    layers = [i if i == "norm" else int(i) for i in arguments.layers]
    few = argparse.Namespace(**{**vars(arguments), "prompts": max(arguments.prompts // 8, 8)})
    for way in arguments.ways:  # warm-up: kernels are compiled, and memory is taken
        run(core, way, layers, few)
    speeds: dict[str, list[float]] = {way: [] for way in arguments.ways}
    peaks: dict[str, list[list[int]]] = {way: [] for way in arguments.ways}
    for turn in range(arguments.turns):
        for way in arguments.ways if turn % 2 == 0 else reversed(arguments.ways):
            result = run(core, way, layers, arguments)
            speeds[way].append(result["tokens_per_second"])
            peaks[way].append(result["peak_bytes"])
            print(json.dumps({"turn": turn, **result}), flush=True)
    if "plain" in speeds:
        others = [way for way in arguments.ways if way != "plain"]
        ratios = {w: [a / b for a, b in zip(speeds[w], speeds["plain"], strict=True)] for w in others}
        summary = {
            "versions": {"vllm": str(vllm_compat.detect().version), "vllm-compat": vllm_compat.__version__},
            "plain_tokens_per_second": round(statistics.median(speeds["plain"]), 1),
            "ratio": {w: round(statistics.median(r), 4) for w, r in ratios.items()},
            "ratio_range": {w: [round(min(r), 4), round(max(r), 4)] for w, r in ratios.items()},
            "peak_bytes_above_plain": {w: above(peaks[w], peaks["plain"]) for w in others},
        }
        print(json.dumps(summary), flush=True)


def above(peaks: list[list[int]], plain: list[list[int]]) -> list[int]:
    """What each rank had beyond the plain runs."""
    most = [[max(rank) for rank in zip(*runs, strict=True)] for runs in (peaks, plain)]
    return [own - other for own, other in zip(*most, strict=True)]


def run(core: Any, way: str, layers: list[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """All prompts once."""
    if way == "extract":
        return extracted(core, layers, arguments)
    begun = time.perf_counter()
    with vllm_compat.attach(core, layer_ids=[] if way == "plain" else layers) as engine:
        attach_seconds = time.perf_counter() - begun
        prompts = {f"{way} {n}": prompt(n, arguments.length, engine.vocab_size) for n in range(arguments.prompts)}

        def collect(*, wait: bool = True) -> None:
            for states in engine.get_captured_states(wait=wait):
                check(states, prompts.pop(states.request_id), engine, way)

        for request_id, token_ids in prompts.items():
            engine.make_request(token_ids, request_id=request_id, ignore_eos=True)
        core.model_executor.collective_rpc(forget)
        steps = Steps(engine, arguments.budget)
        start = time.perf_counter()
        while engine.has_unfinished:
            if way == "waited":
                engine.run_step()
                collect()
            else:
                engine.run_step(lambda: collect(wait=False))
        seconds = time.perf_counter() - start
        collect()
        end = time.perf_counter() - start
        if prompts:
            raise RuntimeError(f"{len(prompts)} prompts gave no states")
        tokens = arguments.prompts * arguments.length
        return {
            "way": way,
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "seconds": round(seconds, 4),
            "tail_seconds": round(end - seconds, 4),
            "attach_seconds": round(attach_seconds, 4),
            **steps.told(seconds),
            **about_ranks(core),
        }


class Steps:
    """How long the steps of an engine take, from now on."""

    def __init__(self, engine: Engine, budget: int) -> None:
        self._all: list[tuple[float, int]] = []
        self._budget = budget
        run_step = engine.run_step

        def timed(*args: Any) -> StepResult:
            start = time.perf_counter()
            step = run_step(*args)
            self._all.append((time.perf_counter() - start, sum(step.num_scheduled_tokens.values())))
            return step

        engine.run_step = timed  # type: ignore[method-assign]

    def told(self, seconds: float) -> dict[str, Any]:
        """``seconds`` are those of the whole run."""
        full = [length for length, tokens in self._all if tokens == self._budget]
        longest = [(length * 1e3, n) for n, (length, _) in enumerate(self._all)]
        between = (seconds - sum(length for length, _ in self._all)) / max(len(self._all), 1)
        return {
            "steps": len(self._all),
            "step_ms": round(statistics.median(full) * 1e3, 2) if full else None,
            "longest_ms": {n: round(ms, 1) for ms, n in sorted(longest, reverse=True)[:4]},
            "between_ms": round(between * 1e3, 2),
        }


def about_ranks(core: Any) -> dict[str, Any]:
    """What each rank found, and the tokens that each captured."""
    replies = core.model_executor.collective_rpc(found)
    tokens = next((reply.pop("tokens") for reply in replies if reply["tokens"]), None)  # all keep the same account
    names = ("peak_bytes", "pass_ms", "gap_ms")
    ranks = {name: [reply[name] for reply in replies] for name in names if replies[0][name] is not None}
    return {**ranks, **({"tokens_of_ranks": tokens} if tokens else {})}


class _Clock:
    """Made when all is ready, just before the first request."""

    start = 0.0

    def __init__(self, _: int) -> None:
        _Clock.start = time.perf_counter()

    def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
        """Nothing to tell."""

    def close(self) -> None:
        """Nothing to end."""


def extracted(core: Any, layers: list[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """All prompts once, into files."""
    folder = Path(tempfile.mkdtemp(dir=arguments.output))
    begun = time.perf_counter()
    with vllm_compat.attach(core, layer_ids=layers) as engine:
        attach_seconds = time.perf_counter() - begun
        prompts = [prompt(n, arguments.length, engine.vocab_size) for n in range(arguments.prompts)]
        data = folder / "prompts.jsonl"
        data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts), encoding="utf-8")
        config = ExtractConfig(
            model=arguments.model,
            prepared_data=data,
            output_dir=folder / "states",
            layer_ids=tuple(layers),
            batch_size=arguments.batch_size or arguments.prompts,
            max_seq_len=arguments.length,
            writers=arguments.writers,
        )
        core.model_executor.collective_rpc(forget)
        steps = Steps(engine, arguments.budget)
        summary = extract(config, engine, progress=_Clock)
        seconds = time.perf_counter() - _Clock.start
        ranks = about_ranks(core)
    files = len(list((folder / "states").glob("hs_*.safetensors")))
    shutil.rmtree(folder)
    if not summary.complete or files != arguments.prompts:
        raise RuntimeError(f"not the run that was asked for: {summary}, {files} files")
    return {
        "way": "extract",
        "tokens": summary.tokens,
        "tokens_per_second": round(summary.tokens / seconds, 1),
        "seconds": round(seconds, 4),
        "mb_per_second": round(summary.bytes / seconds / 1e6, 1),
        "stalled_seconds": round(summary.stalled, 3),
        "attach_seconds": round(attach_seconds, 4),
        **steps.told(seconds),
        **ranks,
    }


def room(core: Any) -> dict[str, Any]:
    """The KV cache, in tokens."""
    cache = core.scheduler.vllm_config.cache_config
    return {"kv_cache_tokens": cache.num_gpu_blocks * cache.block_size}


def disk(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the disk takes of files such as ours, for about as long."""
    config = json.loads((Path(arguments.model) / "config.json").read_text(encoding="utf-8"))
    width = config.get("text_config", config)["hidden_size"]
    part = random.Random(0).randbytes(arguments.length * len(arguments.layers) * width * 2)
    folder = Path(tempfile.mkdtemp(dir=arguments.output))
    start = time.perf_counter()
    with ThreadPoolExecutor(arguments.writers) as pool:
        sizes = list(pool.map(lambda n: write_whole(folder / f"{n}", [part]), range(arguments.prompts)))
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return {"way": "disk", "mb_per_second": round(sum(sizes) / seconds / 1e6, 1), "seconds": round(seconds, 4)}


def check(states: CapturedStates, token_ids: list[int], engine: Engine, way: str) -> None:
    wanted = (len(token_ids), engine.hidden_size)
    found = {tuple(tensor.shape) for tensor in states.hidden_states}
    if found != (set() if way == "plain" else {wanted}):
        raise RuntimeError(f"{states.request_id}: states are {found}, wanted {wanted}")
    if way == "checked" and (list(states.token_ids) != token_ids or stacked(states.hidden_states) is None):
        raise RuntimeError(f"{states.request_id}: other tokens, or states that are not in one stack")


def prompt(number: int, length: int, vocab_size: int) -> list[int]:
    return random.Random(number).choices(range(vocab_size), k=length)


def watch(worker: Any) -> None:
    """Run in the worker, before any tap: mark where each pass begins and ends on the device."""
    import torch

    worker.benchmark_passes = []
    execute_model, passes = worker.model_runner.execute_model, worker.benchmark_passes
    if not torch.cuda.is_available():
        return

    def marked(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        output = execute_model(scheduler_output, *args, **kwargs)
        end.record()
        passes.append((scheduler_output.total_num_scheduled_tokens, begin, end))
        return output

    worker.model_runner.execute_model = marked


def forget(worker: Any) -> None:
    """Run in the worker."""
    import torch

    worker.benchmark_passes.clear()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def found(worker: Any) -> dict[str, Any]:
    """Run in the worker."""
    import torch

    tap = getattr(worker, "vllm_compat_tap", None)
    told: dict[str, Any] = dict.fromkeys(("pass_ms", "gap_ms"))
    told |= {"tokens": None if tap is None else list(tap._division._tokens), "peak_bytes": 0}
    passes = worker.benchmark_passes
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        most = max(tokens for tokens, _, _ in passes)
        full = [begin.elapsed_time(end) for tokens, begin, end in passes if tokens == most]
        gaps = [end.elapsed_time(begin) for (_, _, end), (_, begin, _) in pairwise(passes)]
        told["peak_bytes"] = torch.cuda.max_memory_allocated()
        told["pass_ms"] = round(statistics.median(full), 2)
        told["gap_ms"] = round(statistics.median(gaps), 2) if gaps else None
    return told


def write_head(core: Any, model: Path, folder: Path) -> None:
    """A checkpoint of the end of the model alone."""
    import torch
    from safetensors.torch import save_file

    parts = core.model_executor.collective_rpc(norm_and_head)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    vocab_size = config.get("text_config", config)["vocab_size"]
    head = torch.cat([part for _, part in parts])[:vocab_size].contiguous()
    embedding = torch.zeros((1, 1), dtype=head.dtype).expand(head.shape).contiguous()  # nobody reads it
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(model / "config.json", folder)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": parts[0][0], "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors")


def norm_and_head(worker: Any) -> tuple[Any, Any]:
    """Run in the worker: its part of ``lm_head`` has other tokens than any other rank's."""
    model = worker.model_runner.get_model()
    model = getattr(model, "language_model", model)
    return tuple(t.detach().cpu() for t in (model.model.norm.weight, model.lm_head.weight))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
