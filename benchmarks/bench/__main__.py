"""How fast states are extracted, against vLLM's own prefill of the same prompts, in one run.

    python -m benchmarks.bench --output bench-output

Cases:

- ``plain-eager``, ``plain-compiled``: vLLM's own ``LLM``, prefix caching off; the faster of them is 1;
- ``extract``: the whole job, from the first request to the last durable file and the seal;
- ``capture``: states handed out, no files;
- ``speculators``: the generator of speculators 0.3.0 to 0.4.0.1, no files, where it is installed;
- ``native``: vLLM's own extract_hidden_states, with its files, where this vLLM has it.

Each case is run once in every turn, in a process of its own that first runs other prompts, and in the other order every
second turn. Every case has the same prompts, dtype, requests at once and tokens in a step. Left behind are result.json,
written anew after each process, table.md, picture.png (where matplotlib is installed) and a log of each process.

Exit codes: 0; 1 for a case that failed, or a loss against the result of ``--regress``; 2 for a result that cannot be
compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.bench import machine
from benchmarks.bench.alternate import Turns, alternate
from benchmarks.bench.cases import CASES, PLAIN
from benchmarks.bench.picture import draw
from benchmarks.bench.prompts import make_prompts
from benchmarks.bench.ratios import baseline_of, summarize
from benchmarks.bench.regress import MismatchError, losses
from benchmarks.bench.report import markdown
from benchmarks.bench.settings import Settings

ROOT = Path(__file__).parents[2]
Json = dict[str, Any]


def main() -> int:
    arguments = parse()
    output: Path = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    prepare_environment(arguments)
    model = arguments.model or demo_model(output / arguments.dtype / "smollm2", arguments.dtype)
    settings = settings_of(arguments, model)
    prompts = make_prompts(settings.model, settings.prompts + settings.warmup, settings.length)
    split = {"timed": prompts[: settings.prompts], "warmup": prompts[settings.prompts :]}
    (output / "prompts.json").write_text(json.dumps(split), encoding="utf-8")
    result: Json = {}

    def keep(turns: Turns) -> None:
        result.update(result_of(arguments, settings, turns))
        (output / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    alternate(settings, arguments.cases, arguments.turns, output, arguments.limit, keep)
    table = markdown(result)
    (output / "table.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n")
    if not draw(result, output / "picture.png"):
        print("no picture: matplotlib is not installed")
    return judge(arguments, result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="a folder (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a folder; default: SmolLM2-135M-Instruct, of demo/smollm2.py")
    parser.add_argument("--dtype", default="bfloat16", help="of that SmolLM2 (default: %(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", help="default: 2, n // 2, n - 3 and n - 1 of n")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=16, help="other prompts, run before (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="of a CPU (default: %(default)s)")
    parser.add_argument("--bind", help="cores of a CPU, VLLM_CPU_OMP_THREADS_BIND (default: all of this process)")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="more fields of EngineArgs, as JSON")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one process (default: %(default)s)")
    parser.add_argument("--note", default="", help="words for the result, on what else ran, say")
    parser.add_argument("--regress", type=Path, metavar="FILE", help="an earlier result.json to compare with")
    parser.add_argument("--tolerance", type=float, default=0.05, help="a loss up to this share passes (%(default)s)")
    arguments = parser.parse_args()
    if not set(arguments.cases) & set(PLAIN):
        parser.error(f"nothing to measure against: --cases wants one of {', '.join(PLAIN)}")
    return arguments


def prepare_environment(arguments: argparse.Namespace) -> None:
    """What vLLM reads in every case's process."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(arguments.kv_cache_gib)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = arguments.bind or ",".join(map(str, machine.cores()))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def demo_model(folder: Path, dtype: str) -> Path:
    script = ROOT / "demo" / "smollm2.py"
    subprocess.run([sys.executable, str(script), str(folder), "--dtype", dtype], check=True)
    return folder


def settings_of(arguments: argparse.Namespace, model: Path) -> Settings:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    n = config.get("text_config", config)["num_hidden_layers"]
    layers = arguments.layers or [2, n // 2, n - 3, n - 1]
    return Settings(
        model=str(model.resolve()),
        prompts=arguments.prompts,
        length=arguments.length,
        warmup=arguments.warmup,
        layers=tuple(sorted(set(layers))),
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        kv_cache_gib=arguments.kv_cache_gib,
        engine_options=arguments.engine_options,
    )


def result_of(arguments: argparse.Namespace, settings: Settings, turns: Turns) -> Json:
    told: Json = json.loads(json.dumps(dataclasses.asdict(settings)))  # lists, as they are read back
    del told["model"]  # a path of this machine
    notes = {turn["case"]: list(turn["notes"]) for turn in turns.done if turn["notes"]}
    dtype = json.loads((Path(settings.model) / "config.json").read_text(encoding="utf-8"))
    return {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "model": f"{Path(settings.model).name}, {dtype.get('dtype') or dtype.get('torch_dtype')}",
        "settings": told,
        "cores_bound": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        "note": arguments.note,
        "asked": arguments.cases,
        "turns_asked": arguments.turns,
        "baseline": baseline_of(turns.done),
        "cases": summarize(turns.done),
        "not_available": turns.not_available,
        "failed": turns.failed,
        "notes": notes,
        "turns": [{name: value for name, value in turn.items() if name != "notes"} for turn in turns.done],
    }


def judge(arguments: argparse.Namespace, result: Json) -> int:
    """The exit code."""
    code = 1 if result["failed"] or not result["baseline"] else 0
    if arguments.regress:
        old = json.loads(arguments.regress.read_text(encoding="utf-8"))
        try:
            lost = losses(old, result, arguments.tolerance)
        except MismatchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        for line in lost:
            print(f"slower: {line}")
        if not lost:
            print(f"no loss of more than {arguments.tolerance:.0%} against {arguments.regress.name}")
        code = 1 if lost else code
    return code


if __name__ == "__main__":
    sys.exit(main())
