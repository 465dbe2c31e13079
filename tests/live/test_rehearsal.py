"""The rehearsal of a run on the vLLM of this environment: what it builds, and what it finds before the load."""

from __future__ import annotations

import dataclasses
import json

import pytest

from conftest import FAULTS, KV_CACHE_BYTES, ON_GPU, RANKS, skip_if_faulty
from vllm_compat.errors import StepError, UnsupportedModelError, UsageError
from vllm_compat.extract import ExtractConfig
from vllm_compat.extract.kvcache import kv_bytes_per_token
from vllm_compat.extract.plan import make_plan
from vllm_compat.extract.rehearsal import RehearsalError, rehearse, spec_of
from vllm_compat.extract.stage import _stage

PATIENCE = 580  # seconds; two loaded cores import vLLM for minutes
NO_CUSTOM_OPS = {"compilation_config": {"custom_ops": ["none"]}}


@pytest.fixture
def config(model, tmp_path):
    """``config("llama", layer_ids=...)``: a run of three samples into an empty folder; one is longer than a step."""

    def make(name, **changes):
        folder = model(name) if isinstance(name, str) else name
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps({"input_ids": [7] * n}) + "\n" for n in (5, 40, 400)))
        values = {
            "model": str(folder),
            "prepared_data": data,
            "output_dir": tmp_path / "states",
            "layer_ids": (1, 3, 5, "norm"),
            "batch_size": 2,
            "max_seq_len": 400,
            "max_num_batched_tokens": 256,
            "dtype": "float32",
            "tensor_parallel_size": RANKS,
            "gpu_memory_utilization": 0.1 if ON_GPU else None,
            "engine_options": {"kv_cache_memory_bytes": KV_CACHE_BYTES} if ON_GPU else {},
        }
        return ExtractConfig(**{**values, **changes})

    return make


@pytest.fixture
def stage(tmp_path):
    """The rehearsal in this very process, which has imported vLLM."""

    def play(config):
        if "worker-process" in FAULTS and RANKS == 1:
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            backend = {"distributed_executor_backend": UniProcExecutor}
            config = dataclasses.replace(config, engine_options={**config.engine_options, **backend})
        folder = tmp_path / "rehearsal"
        folder.mkdir()
        return _stage(spec_of(config, make_plan(config)), folder)

    return play


def changed(folder, model, **changes):
    """A folder with another model's configuration, changed, and no weights at all."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_through_a_process_of_its_own(config, tmp_path):
    """No weight is read, and of the folder only what was there is left."""
    asked = config("llama", save_dtype="float32")
    found = rehearse(asked, make_plan(asked), timeout_s=PATIENCE)
    assert (found.num_layers, found.of, found.layer_ids) == (3, 6, (0, 1, 2, "norm"))
    assert (found.samples, found.longest, found.chunked, found.nonfinite) == (4, 256 + 33, True, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "states"]
    assert list((tmp_path / "states").iterdir()) == []


def test_what_vllm_refuses_is_told_through_the_process(config, tmp_path):
    asked = config("llama", engine_options={"enforce_eager": False})
    with pytest.raises(RehearsalError, match="a tap on a compiled model captures nothing") as caught:
        rehearse(asked, make_plan(asked), timeout_s=PATIENCE)
    assert caught.value.exit_code == UsageError.exit_code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "states"]


@pytest.mark.parametrize("name", ["gemma", "gpt2"])
def test_other_shapes_of_models(name, config, stage):
    """Embeddings that are multiplied; layers that the configuration calls otherwise, and that give one tensor."""
    found = stage(config(name, layer_ids=(0, 5)))
    assert (found["num_layers"], found["layer_ids"], found["nonfinite"]) == (2, (0, 1), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] + ["float16"] * ON_GPU)
def test_dense_and_experts(dtype, config, stage):
    """DeepSeek-V3: the first layer is dense, and no rehearsal without one of experts."""
    skip_if_faulty("deepseek-build", "experts", "experts-amx")
    found = stage(config("deepseek_v3", layer_ids=(3,), dtype=dtype, engine_options=NO_CUSTOM_OPS))
    assert (found["num_layers"], found["of"], found["layer_ids"], found["nonfinite"]) == (2, 4, (1,), 0)


def test_a_wrapper_is_cut_where_its_language_model_is(config, stage):
    """Kimi-K2.5: the vision tower beside it keeps its own number of layers."""
    skip_if_faulty("kimi-start", "kimi-gpu", "deepseek-build", "experts", "experts-amx")
    options = {"limit_mm_per_prompt": {"vision_chunk": 0}, **NO_CUSTOM_OPS}
    found = stage(config("kimi_k25", layer_ids=(1, "norm"), engine_options=options))
    assert (found["num_layers"], found["of"], found["layer_ids"]) == (3, 4, (1, "norm"))


def test_an_architecture_that_vllm_does_not_have(config, stage, model, tmp_path):
    folder = changed(tmp_path / "odd", model("llama"), architectures=["OddForCausalLM"], model_type="odd")
    with pytest.raises(UsageError, match="vLLM refuses the model"):
        stage(config(folder))


def test_a_model_that_cannot_be_captured(config, stage, model, tmp_path):
    folder = changed(
        tmp_path / "bert",
        model("llama"),
        architectures=["BertModel"],
        model_type="bert",
        type_vocab_size=2,
        hidden_act="gelu",
    )
    with pytest.raises((UnsupportedModelError, UsageError)):
        stage(config(folder))


@pytest.mark.parametrize(
    ("options", "match"),
    [({"no_such_option": 1}, "no_such_option"), ({"enforce_eager": False}, "captures nothing")],
)
def test_an_option_that_vllm_or_capturing_does_not_have(options, match, config, stage):
    with pytest.raises(UsageError, match=match):
        stage(config("llama", engine_options=options))


def test_a_dtype_that_models_do_not_have(config, stage):
    with pytest.raises(UsageError, match="float64"):
        stage(config("llama", dtype="float64"))


@pytest.mark.skipif(ON_GPU and RANKS > 1, reason="workers that are spawned do not know a class of this test's")
def test_a_layer_whose_output_is_no_state(config, stage, model, tmp_path):
    """A model that runs well, and whose layers give the next one something that is neither a tensor nor two."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class Pair:
        def __init__(self, parts):
            self.parts = parts

        def __iter__(self):
            return iter(self.parts)

    class OddForCausalLM(LlamaForCausalLM):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for layer in self.model.layers:
                layer.forward = lambda *args, _forward=layer.forward, **kwargs: Pair(_forward(*args, **kwargs))

    ModelRegistry.register_model("OddForCausalLM", OddForCausalLM)
    folder = changed(tmp_path / "odd", model("llama"), architectures=["OddForCausalLM"])
    with pytest.raises(StepError, match=r"decoder layer LlamaDecoderLayer returns \(Pair\)"):
        stage(config(folder))


@pytest.mark.parametrize("name", ["llama", "gemma", "deepseek_v3"])
def test_the_kv_cache_is_what_vllm_takes(name, open_engine, config):
    """Per token, on each GPU: of the engine's own account of its cache."""
    if name == "deepseek_v3":
        skip_if_faulty("mla", "deepseek-build", "experts", "experts-amx")
    options = NO_CUSTOM_OPS if name == "deepseek_v3" else {}
    engine = open_engine(name, layer_ids=[0], **options)
    groups = engine._scheduler.kv_cache_config.kv_cache_groups
    taken = sum(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes // group.kv_cache_spec.block_size
        for group in groups
    )
    assert kv_bytes_per_token(config(name))[0] == taken
