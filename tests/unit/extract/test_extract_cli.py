"""Every option reaches the configuration, and the configuration the engine."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.extract.cli import config_of, make_parser, same_dashes
from vllm_compat.extract.config import ExtractConfig

PROMISED = (
    "--model-path M --prepared-data tokenized_data.jsonl --output-dir D --batch-size 2 --max-seq-len 2048 --tp-size 8 "
    "--gpu-memory-utilization 0.80 --layer-ids 2 30 58 60"
)
REQUIRED = "--model M --prepared-data F --output-dir D "


def parsed(line: str) -> ExtractConfig:
    return config_of(make_parser().parse_args(same_dashes(shlex.split(line))))


def test_the_promised_command_line() -> None:
    assert parsed(PROMISED) == ExtractConfig(
        model="M",
        prepared_data="tokenized_data.jsonl",
        output_dir="D",
        batch_size=2,
        max_seq_len=2048,
        tensor_parallel_size=8,
        gpu_memory_utilization=0.8,
        layer_ids=(2, 30, 58, 60),
    )


def test_defaults_of_the_command_line_are_those_of_the_config() -> None:
    assert parsed(REQUIRED) == ExtractConfig("M", "F", "D")


def test_underscores_are_dashes_in_names_alone() -> None:
    line = "--model_path=my_model --prepared_data a_b.jsonl --output_dir out_put --tp_size 2 --layer_ids norm 1"
    config = parsed(line)
    assert (config.model, config.prepared_data, config.output_dir) == ("my_model", "a_b.jsonl", "out_put")
    assert (config.tensor_parallel_size, config.layer_ids) == (2, ("norm", 1))


def test_the_other_options() -> None:
    config = parsed(
        REQUIRED + "--tensor-parallel-size 4 --dtype float16 --save-dtype auto --max-num-batched-tokens 4096 "
        "--trust-remote-code --num-samples 7 --engine-option swap_space=4 --engine-option 'load-format=\"dummy\"'"
    )
    assert config.open_engine_options(2049) == {
        "tensor_parallel_size": 4,
        "max_model_len": 2049,
        "max_num_seqs": 8,
        "dtype": "float16",
        "max_num_batched_tokens": 4096,
        "trust_remote_code": True,
        "swap_space": 4,
        "load_format": "dummy",
    }
    assert (config.save_dtype, config.num_samples) == ("auto", 7)


def test_the_options_of_a_long_run() -> None:
    config = parsed(REQUIRED + "--format speculators --on-nonfinite skip --shard 3/16 --writers 4 --max-pending-gb 0.5")
    assert (config.format, config.on_nonfinite, config.shard) == ("speculators", "skip", (3, 16))
    assert (config.writers, config.max_pending_bytes) == (4, 1 << 29)


def test_what_was_not_asked_for_is_left_to_vllm() -> None:
    options = ExtractConfig("M", "F", "D", gpu_memory_utilization=0.5).open_engine_options(10)
    assert options["gpu_memory_utilization"] == 0.5
    assert not {"max_num_batched_tokens", "trust_remote_code"} & options.keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--layer-ids -1", "a layer id is a number from 0"),
        ("--layer-ids 1.5", "a layer id is a number from 0"),
        ("--layer-ids", "expected at least one argument"),
        ("--save-dtype float64", "invalid choice"),
        ("--batch 2", "unrecognized arguments"),
        ("--engine-option quantization=fp8", "is not JSON"),
        ("--engine-option quantization", "wants NAME=JSON"),
        ("--format pickle", "invalid choice"),
        ("--on-nonfinite retry", "invalid choice"),
        ("--shard 2/2", "wants I/N with I from 0 to N - 1, found '2/2'"),
        ("--shard 1", "wants I/N"),
        ("--shard -1/2", "expected one argument"),
        ("--max-pending-gb much", "wants a number of GiB"),
        ("--max-pending-gb inf", "wants a number of GiB"),
    ],
)
def test_options_that_argparse_refuses(capsys: pytest.CaptureFixture[str], options: str, words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(REQUIRED + options)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_an_engine_option_given_twice() -> None:
    with pytest.raises(UsageError, match="seed is given twice"):
        parsed(REQUIRED + "--engine-option seed=1 --engine-option seed=2")


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": 0},
        {"max_seq_len": 0},
        {"tensor_parallel_size": -1},
        {"max_num_batched_tokens": 0},
        {"num_samples": 0},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.1},
        {"gpu_memory_utilization": float("nan")},
        {"save_dtype": "float64"},
        {"on_nonfinite": "retry"},
        {"writers": 0},
        {"max_pending_bytes": 0},
        {"layer_ids": ()},
        {"engine_options": {"max_model_len": 5}},
        {"engine_options": {"max_num_seqs": 5}},
        {"engine_options": {"tensor_parallel_size": 5}},
    ],
)
def test_values_that_cannot_mean_anything(values: dict[str, Any]) -> None:
    [name] = values
    with pytest.raises(UsageError, match=name if name != "engine_options" else "is set by"):
        ExtractConfig("M", "F", "D", **values)
