"""``python -m vllm_compat.extract`` with a fake engine in the place of vLLM's, to be run and killed by tests.

python fake_command.py [--step-s SECONDS] [--load-s SECONDS] OPTIONS OF EXTRACT
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

import vllm_compat.engine
from vllm_compat.extract.__main__ import main
from vllm_compat.testing import FakeEngine
from vllm_compat.types import StepResult


class SlowEngine(FakeEngine):
    """Takes its time for a step."""

    step_s = 0.0

    def run_step(self, meanwhile: Any = None) -> StepResult:
        time.sleep(self.step_s)
        return super().run_step(meanwhile)


def run(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    own, rest = parser.parse_known_args(arguments)

    def open_engine(model: str, **options: Any) -> FakeEngine:
        print(f"loading {model}", file=sys.stderr, flush=True)
        time.sleep(own.load_s)
        engine = SlowEngine(
            options["layer_ids"],
            num_layers=8,
            max_model_len=options["max_model_len"],
            max_num_seqs=2,
            make_tensor=np.array,
        )
        engine.step_s = own.step_s
        return engine

    setattr(vllm_compat.engine, "open_engine", open_engine)  # noqa: B010 - its type has one argument more
    return main([*rest, "--no-rehearsal"])  # there is no vLLM to rehearse with


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
