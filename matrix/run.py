"""The live suite on many releases, each in its own environment: one bad release spoils nothing.

    nox -s matrix -- 0.16.0 0.32.0
    nox -s matrix -- --oldest --newest --random 1
    nox -s matrix -- --all --jobs 2 --record

The end is a table of what passed, what failed and why, and what could not be installed and why: on the terminal, and as
matrix.md and matrix.json in the report folder, beside each release's log, JUnit file and list of packages.
Exit codes: 0 every release passed, 1 one did not, 2 usage.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from matrix.results import Result, as_json, as_markdown, read_result, record

from vllm_compat._detect.matrix import Release, load_matrix

ROOT = Path(__file__).parents[1]
REPORT = ROOT / ".nox" / "matrix"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, and say by the exit code whether all is well."""
    options = _parser().parse_args(argv)
    table = load_matrix()
    rows = {r.vllm: r for r in table if r.cpu_wheel or r.mixture}
    unknown = [name for name in options.release if name not in rows]
    if unknown:
        print(f"no CPU build of {', '.join(unknown)}; matrix/vllm.toml has one of {', '.join(rows)}", file=sys.stderr)
        return 2
    chosen = choose(list(rows.values()), options)
    if not chosen:
        print("name releases, or --all, --oldest, --newest, --random N", file=sys.stderr)
        return 2
    options.report.mkdir(parents=True, exist_ok=True)
    results = list(run_all(chosen, options))
    if options.all:
        results += [Result(r.vllm, "no CPU build", {}, {}, r.no_cpu, 0, False) for r in table if r.vllm not in rows]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    markdown = as_markdown(results, today)
    (options.report / "matrix.md").write_text(markdown, encoding="utf-8")
    (options.report / "matrix.json").write_text(as_json(results, today), encoding="utf-8")
    print(f"\n{markdown}\nthe same, the logs and the packages: {options.report}")
    if options.record:
        record(ROOT / "matrix" / "vllm.toml", results, today)
        subprocess.run([sys.executable, ROOT / "matrix" / "readme.py"], check=True)
    return 0 if all(r.good for r in results) else 1


def choose(rows: Sequence[Release], options: argparse.Namespace) -> list[Release]:
    """The rows asked for, oldest first, each once."""
    wanted = {*options.release}
    built = [r.vllm for r in rows if r.cpu_wheel]
    wanted |= {built[0]} if options.oldest else set()
    wanted |= {built[-1]} if options.newest else set()
    others = [r.vllm for r in rows if r.vllm not in wanted and "cpu" in r.proven]  # what never passed says nothing new
    wanted |= set(random.Random(options.seed).sample(others, min(options.random, len(others))))
    return [r for r in rows if options.all or r.vllm in wanted]


def run_all(releases: Iterable[Release], options: argparse.Namespace) -> Iterable[Result]:
    """Each release's result, in the order of the releases; at most ``options.jobs`` of them run at once."""
    places: SimpleQueue[int] = SimpleQueue()
    for place in range(options.jobs):
        places.put(place)

    def run(release: Release) -> Result:
        place = places.get()
        try:
            result = run_one(release, place, options)
        finally:
            places.put(place)
        print(f"{result.release:<8} {result.outcome}: {result.why or result.counts}, {result.seconds} s", flush=True)
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        yield from pool.map(run, releases)


def run_one(release: Release, place: int, options: argparse.Namespace) -> Result:
    """The session ``live(X)`` in a process of its own, its output in X.log."""
    report: Path = options.report.resolve()
    for old in report.glob(f"{release.vllm}.*"):
        if old.stem == release.vllm:
            old.unlink()
    # By default every engine would take the first core. Each of several runs starts from a core of its own.
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[(place + n) % len(cores)]) for n in range(len(cores)))
    command = [sys.executable, "-m", "nox", "-s", f"live({release.vllm})", "--", "--report", str(report)]
    started = time.monotonic()
    with (report / f"{release.vllm}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *(["--keep"] if options.keep else []), *options.pytest],
            cwd=ROOT,
            env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": binding},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(options.timeout)
        except BaseException as error:
            os.killpg(process.pid, 9)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = -9
    return read_result(release.vllm, report, code, round(time.monotonic() - started))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s matrix --", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("release", nargs="*", help="releases of vLLM that have a row, and a CPU build or a mixture")
    parser.add_argument("--all", action="store_true", help="every release that can be run here")
    parser.add_argument("--oldest", action="store_true", help="the oldest with a CPU build")
    parser.add_argument("--newest", action="store_true", help="the newest with a CPU build")
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="N others by chance, of those that passed before"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of that chance")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="releases at once: one to a core, 5 GiB each")
    parser.add_argument("--keep", action="store_true", help="keep the environments (2 to 8 GB each)")
    parser.add_argument("--timeout", type=float, default=3600, metavar="S", help="for one release")
    parser.add_argument(
        "--record", action="store_true", help="write today as `proven.cpu` of what passed into the table"
    )
    parser.add_argument("--report", type=Path, default=REPORT, metavar="DIR")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="the rest is pytest's")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
