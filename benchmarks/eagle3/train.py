"""`speculators train` on a machine without an accelerator: the options are its own.

    python benchmarks/eagle3/train.py --verifier-name-or-path DIR --data-path DIR --save-path DIR ...

speculators 0.9.0 trains on accelerators alone: its trainer sends the model to device number 0 and asks for an
accelerator's clock. Here, in this process only, that device is the CPU and the clock needs no waiting; autocast is the
CPU's. Everything else, from the command line to the checkpoint, is speculators' own code as installed.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def main() -> None:
    threads = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)
    os.environ.setdefault("OMP_NUM_THREADS", threads)  # before torch: speculators sets 1 for its data workers otherwise
    import torch
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    torch.set_num_threads(int(threads))
    on_the_cpu(torch, cli)
    cli.main(TrainConfig.resolve(sys.argv[1:]))


def on_the_cpu(torch: Any, cli: Any) -> None:
    """Put the CPU where the trainer looks for an accelerator."""
    if torch.accelerator.is_available():
        return

    class OnTheCpu(cli.Trainer):  # type: ignore[misc]
        def setup_model(self) -> None:
            self.local_rank, self.device_type = torch.device("cpu"), "cpu"
            super().setup_model()

    torch.accelerator.synchronize = lambda device=None, /: None
    cli.Trainer = OnTheCpu


if __name__ == "__main__":
    main()
