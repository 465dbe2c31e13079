"""The user's own run, watched from the command to the proof: all that one visit to a large machine is to measure.

    python benchmarks/whole_run.py --model SHAPE --output DIR --tp-size 8 --layers 2 30 58 60 --samples 512

SHAPE is a folder with a ``config.json`` and no weights; ``--experts 384`` makes it the full size. One after the other,
a JSON line each:

- ``prefill``: ``capture_gpu.py`` with plain prefill, states and files in turns on one engine, the team's limits;
- ``team``: ``python -m vllm_compat.extract`` with the options of the run that this project was born from
  (``--batch-size 2 --gpu-memory-utilization 0.80``), ended by SIGTERM after an eighth of the samples, and run again;
- ``defaults``: the same samples with the defaults of the command, rehearsal included;
- ``verify``: every file of both read, and the self-check on every sample, against the sampled tokens.

Of each run: seconds from the start to the first sample that its journal names; tokens per second as the run itself says
it; MB of host memory (all processes, what they share counted once) and of each GPU, over time; the exit code. Logs and
``result.jsonl`` are kept in the output folder, samples are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_EVERY_S = 1.0
_POINTS = 40  # of a series over time, in the result


def main() -> None:
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    model = make_model(arguments)
    data = make_data(arguments, model)
    for stage in arguments.stages:
        result = {"stage": stage, **STAGES[stage](arguments, model, data)}
        line = json.dumps(result)
        print(line, flush=True)
        with (arguments.output / "result.jsonl").open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    for name in ("team", "defaults"):
        shutil.rmtree(arguments.output / name, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--experts", type=int, help="routed experts, instead of those of the config")
    parser.add_argument("--output", type=Path, required=True, help="a folder for files, logs and the result")
    parser.add_argument("--layers", nargs="+", default=["2", "30", "58", "60"])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each sample")
    parser.add_argument("--tp-size", type=int, default=8)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2, help="of prefill")
    parser.add_argument("--engine-option", action="append", default=[], help="NAME=JSON, for every engine")
    parser.add_argument("--device", default="cuda", help="where verify computes")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    return parser.parse_args()


def make_model(arguments: argparse.Namespace) -> Path:
    """The shape, and from ``prefill`` on the end of the model beside it, for ``verify``."""
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    if arguments.experts:
        config.get("text_config", config)["n_routed_experts"] = arguments.experts
    model: Path = arguments.output / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def make_data(arguments: argparse.Namespace, model: Path) -> Path:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    vocab_size = config.get("text_config", config)["vocab_size"]
    data: Path = arguments.output / "tokenized_data.jsonl"
    with data.open("w", encoding="utf-8") as out:
        for number in range(arguments.samples):
            ids = random.Random(number).choices(range(vocab_size), k=arguments.length)
            out.write(json.dumps({"input_ids": ids}) + "\n")
    return data


def prefill(arguments: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    options = dict(text.split("=", 1) for text in arguments.engine_option)
    options = {name: json.loads(value) for name, value in options.items()}
    options |= {"tensor_parallel_size": arguments.tp_size}
    options.setdefault("gpu_memory_utilization", 0.80)
    head = arguments.output / "head"
    files = arguments.output / "prefill"
    files.mkdir(exist_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("capture_gpu.py")), "--model", str(model)]
    command += ["--layers", *arguments.layers, "--prompts", str(arguments.samples), "--length", str(arguments.length)]
    command += ["--turns", str(arguments.turns), "--writers", str(arguments.writers), "--options", json.dumps(options)]
    command += ["--output", str(files), "--head", str(head)]
    watched = Watch(files)
    done, said = run(command, arguments.output / "prefill.log", watched)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    shutil.rmtree(files)
    return {"exit_code": done, "lines": lines, **watched.told()}


def team(arguments: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    """Stopped early, and the same command again."""
    folder: Path = arguments.output / "team"
    command = extraction(arguments, model, data, folder, "--batch-size", "2", "--no-rehearsal")
    if not any(text.startswith("gpu_memory_utilization=") for text in arguments.engine_option):
        command += ["--gpu-memory-utilization", "0.80"]
    result: dict[str, Any] = {}
    for turn, stop_after in (("stopped", max(arguments.samples // 8, 1)), ("resumed", None)):
        watched = Watch(folder, stop_after)
        code, said = run(command, arguments.output / f"team-{turn}.log", watched)
        result[turn] = {"exit_code": code, "summary": json.loads(said) if said else None, **watched.told()}
    return result


def defaults(arguments: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    folder: Path = arguments.output / "defaults"
    watched = Watch(folder)
    code, said = run(extraction(arguments, model, data, folder), arguments.output / "defaults.log", watched)
    return {"exit_code": code, "summary": json.loads(said) if said else None, **watched.told()}


def verify(arguments: argparse.Namespace, model: Path, data: Path) -> dict[str, Any]:
    """The run names the shape as its model; what stands beside it is that model's end."""
    result: dict[str, Any] = {}
    shutil.copy(arguments.output / "head" / "model.safetensors", model)
    for name in ("team", "defaults"):
        report = arguments.output / f"verify-{name}.json"
        command = [sys.executable, "-m", "vllm_compat", "verify", str(arguments.output / name), "--json", str(report)]
        command += ["--device", arguments.device]
        begun = time.monotonic()
        code, _ = run(command, arguments.output / f"verify-{name}.log", None)
        told = json.loads(report.read_text(encoding="utf-8")) if report.exists() else None
        result[name] = {"exit_code": code, "seconds": round(time.monotonic() - begun, 1), "report": told}
    return result


STAGES = {"prefill": prefill, "team": team, "defaults": defaults, "verify": verify}


def extraction(arguments: argparse.Namespace, model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "vllm_compat.extract", "--model-path", str(model), "--prepared-data", str(data)]
    command += [
        "--output-dir",
        str(folder),
        "--max-seq-len",
        str(arguments.length),
        "--tp-size",
        str(arguments.tp_size),
    ]
    command += ["--layer-ids", *arguments.layers, "--writers", str(arguments.writers), "--json", *more]
    for option in ('load_format="dummy"', "skip_tokenizer_init=true", *arguments.engine_option):
        command += ["--engine-option", option]
    return command


def run(command: list[str], log: Path, watched: Watch | None) -> tuple[int, str]:
    """Its exit code, and its stdout; the log has the rest."""
    with contextlib.ExitStack() as stack:
        err = stack.enter_context(log.open("wb"))
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True))
        if watched:
            stack.enter_context(watched.over(process))
        said, _ = process.communicate()
    return process.returncode, said


class Watch:
    """What a process and its children do to the machine, and when its folder has its first sample."""

    def __init__(self, folder: Path, stop_after: int | None = None) -> None:
        self._folder = folder
        self._stop_after = stop_after
        self._before = self._committed()
        self._end = threading.Event()
        self._begun = 0.0
        self._first: float | None = None
        self._stopped: float | None = None
        self._points: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def over(self, process: subprocess.Popen[str]) -> Any:
        self._begun = time.monotonic()
        looks = threading.Thread(target=self._look, args=(process,))
        looks.start()
        try:
            yield
        finally:
            self._end.set()
            looks.join()
            self._seconds = time.monotonic() - self._begun

    def told(self) -> dict[str, Any]:
        series = self._points[:: max(len(self._points) // _POINTS, 1)]
        host = [point["host_mb"] for point in self._points]
        gpus = [point["gpu_mb"] for point in self._points if point["gpu_mb"]]
        return {
            "seconds": round(self._seconds, 1),
            "seconds_to_first_sample": self._first,
            "seconds_to_sigterm": self._stopped,
            "most_host_mb": max(host, default=None),
            "most_gpu_mb": [max(gpu) for gpu in zip(*gpus, strict=True)],
            "over_time": series,
        }

    def _look(self, process: subprocess.Popen[str]) -> None:
        due = 0.0
        while not self._end.wait(0.1):
            now = time.monotonic() - self._begun
            done = self._committed() - self._before
            if done and self._first is None:
                self._first = round(now, 1)
            if self._stop_after and done >= self._stop_after and self._stopped is None:
                self._stopped = round(now, 1)
                process.send_signal(signal.SIGTERM)
            if now >= due:
                due = now + _EVERY_S
                self._points.append(
                    {"s": round(now), "samples": done, "host_mb": host_mb(process.pid), "gpu_mb": gpus_mb()}
                )

    def _committed(self) -> int:
        lines = (path.read_bytes().count(b"\n") for path in self._folder.glob("journal-*"))
        return sum(lines)


def host_mb(pid: int) -> int:
    """Memory of a process and all below it, shared pages by their share."""
    below, found = [pid], 0
    while below:
        one = below.pop()
        with contextlib.suppress(OSError, ValueError):
            below += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
            found += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return found // 1000


def gpus_mb() -> list[int]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return [int(line) for line in said.split()]


if __name__ == "__main__":
    main()
