"""vLLM's own Ray executor on CPUs, as two nodes with a core each: Ray is told that a core is a GPU.

    python ray_on_a_cpu.py MODEL PROMPTS OUT

vLLM takes its multiproc executor on a CPU whatever is asked for. What keeps it from Ray are three things, mended here
in the driver's process and in Ray's workers: the platform names no resource, its configuration is overruled, and a rank
has no device to be set. All else is vLLM's: placement, ranks, its compiled graph, collective calls.

Prints what was captured with ``torch.save``: request id -> a tensor for each layer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

LAYERS = (5, 0, "norm")
SECOND_NODE = "127.0.0.2"  # vLLM wants an address of its own for each node


def tell_the_platform() -> None:
    """Run in the driver, and by Ray at the start of each worker."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.executor import ray_utils

    platform: Any = CpuPlatform
    platform.ray_device_key = "GPU"
    platform.device_control_env_var = "VLLM_COMPAT_TEST_DEVICES"  # else it would be taken for NUMA nodes
    own = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        asked = parallel.distributed_executor_backend
        own(cls, vllm_config)
        parallel.distributed_executor_backend = asked

    platform.check_and_update_config = classmethod(check_and_update_config)
    wrapper: Any = ray_utils.RayWorkerWrapper
    wrapper.setup_device_if_necessary = lambda _: None


def main(model: str, prompts: str, out: str) -> None:
    """Start the cluster, capture, end it."""
    import ray
    import torch
    from ray.cluster_utils import Cluster

    import vllm_compat

    ray_: Any = ray
    tell_the_platform()
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    cluster.add_node(num_cpus=2, num_gpus=1, env_vars={"VLLM_HOST_IP": SECOND_NODE})
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"env_vars": {"PYTHONPATH": path}, "worker_process_setup_hook": "ray_on_a_cpu.tell_the_platform"}
    ray_.init(address=cluster.address, runtime_env=environment, log_to_driver=False)
    samples: dict[str, list[int]] = json.loads(Path(prompts).read_text(encoding="utf-8"))
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 64}
    with vllm_compat.open_engine(
        model, layer_ids=LAYERS, tensor_parallel_size=2, distributed_executor_backend="ray", **options
    ) as engine:
        executor: Any = getattr(engine, "_executor")  # noqa: B009
        kind, nodes = type(executor).__name__, executor.collective_rpc(_node)
        for request_id, token_ids in samples.items():
            engine.make_request(token_ids, request_id=request_id)
        captured: dict[str, Any] = {}
        while engine.has_unfinished:
            engine.run_step()
            for states in engine.get_captured_states():
                assert list(states.token_ids) == samples[states.request_id]
                captured[states.request_id] = [tensor.clone() for tensor in states.hidden_states]
    torch.save({"executor": kind, "nodes": nodes, "captured": captured}, out)
    ray_.shutdown()
    cluster.shutdown()


def _node(_worker: Any) -> str:
    """Run in each rank: the Ray node that it is on."""
    import ray

    found: Any = ray
    return str(found.get_runtime_context().get_node_id())


if __name__ == "__main__":
    main(*sys.argv[1:])
