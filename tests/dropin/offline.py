"""A user's script: conversations in, ``data_{i}.pt`` out, by speculators' own preprocessing and generator."""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from vllm import envs

envs.VLLM_WORKER_MULTIPROC_METHOD = "spawn"

from speculators.data_generation.config_generator import DataGenerationConfig  # noqa: E402
from speculators.data_generation.preprocessing import load_and_preprocess_dataset  # noqa: E402
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--data", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--layer-ids", type=int, nargs="+")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    options = parser.parse_args()
    output = Path(options.output)
    output.mkdir()
    dataset, _ = load_and_preprocess_dataset(
        options.model,
        options.data,
        seq_length=256,
        build_dataset_num_proc=1,
        token_freq_path=str(output.parent / "token_freq.pt"),
        cache_dir=str(output.parent / "cache"),
    )
    generator = VllmHiddenStatesGenerator(
        model_path=options.model,
        layer_ids=options.layer_ids,
        max_model_len=256,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    lengths = {}
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(dataset), options.batch_size):
            batch = dataset[start : start + options.batch_size]
            for at, result in enumerate(generator.generate(batch["input_ids"])):
                number, count = start + at, len(result["input_ids"])
                result["loss_mask"] = batch["loss_mask"][at][:count]
                lengths[str(number)] = count
                pool.submit(torch.save, result, output / f"data_{number}.pt").result()
    (output / "sample_lengths.json").write_text(json.dumps(lengths))
    if not torch.cuda.is_available():
        torch.cuda.get_device_name = lambda *_: "none"  # which the record wants to know
    config = DataGenerationConfig.from_generator(
        generator=generator,
        train_data_path=options.data,
        seq_length=256,
        cache_dir="",
        num_samples=len(dataset),
        seed=0,
    )
    (output.parent / "data_config.json").write_text(json.dumps(config.to_dict()))


if __name__ == "__main__":
    main()
