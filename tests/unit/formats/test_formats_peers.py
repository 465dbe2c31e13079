"""Files for SpecForge and ModelOpt, read by their own code where it is installed: ``pip install --no-deps`` will do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_compat.formats import SampleData, get_format
from vllm_compat.types import LayerId

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

POST: tuple[LayerId, ...] = (1, 3, 4, "norm")
PRE: tuple[LayerId, ...] = (1, 3, 4, 5)
LENGTHS = (5, 3, 9, 2)
HIDDEN = 8


def some_samples(layer_ids: tuple[LayerId, ...]) -> list[SampleData]:
    generator = torch.Generator().manual_seed(0)
    return [
        SampleData(
            index=index,
            id=f"row-{index}",
            token_ids=tuple(torch.randint(0, 1000, (length,), generator=generator).tolist()),
            loss_mask=tuple(int(at >= length // 2) for at in range(length)),
            layer_ids=layer_ids,
            hidden_states=torch.randn(length, 4, HIDDEN, generator=generator).to(torch.bfloat16),
            metadata={"model": "m"},
        )
        for index, length in enumerate(LENGTHS)
    ]


def write(folder: Path, name: str, samples: list[SampleData]) -> list[Path]:
    paths = []
    for sample in samples:
        paths.append(folder / get_format(name).file(sample.index, sample.id))
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_bytes(b"".join(get_format(name).encode(sample)))
    (folder / "run.json").write_text("{}")
    (folder / "journal-0-of-1.jsonl").write_text("")
    (folder / "draft_config.json").write_text("{}")
    return paths


def test_specforge_trains_on_it(tmp_path: Path) -> None:
    data = pytest.importorskip("specforge.algorithms.eagle3.data", exc_type=ImportError)
    store = pytest.importorskip("specforge.runtime.data_plane.feature_store", exc_type=ImportError)
    loader = pytest.importorskip("specforge.runtime.data_plane.feature_dataloader", exc_type=ImportError)
    samples = some_samples(POST)
    write(tmp_path, "specforge", samples)
    reader = data.build_offline_reader(str(tmp_path), run_id="r", ttt_length=1, max_len=64)
    reader.validate_files = True
    refs = reader.read()
    assert [ref.num_tokens for ref in refs] == list(LENGTHS)
    batches = list(
        loader.FeatureDataLoader(
            store.LocalFeatureStore(),
            refs=refs,
            batch_size=1,
            per_sample_transform=data.build_offline_normalizer(64),
            collate_fn=data.build_offline_collator(),
        )
    )
    assert len(batches) == len(samples)
    for batch, sample in zip(batches, samples, strict=True):
        found, length = batch.tensors, len(sample.token_ids)
        states = sample.hidden_states
        assert found["input_ids"][0, :length].tolist() == list(sample.token_ids)
        assert found["loss_mask"][0, :length].flatten().tolist() == [*(sample.loss_mask or ())[:-1], 0]
        assert torch.equal(found["hidden_state"][0, :length], states[:, :-1].flatten(1))
        assert torch.equal(found["target"][0, :length], states[:, -1])


@pytest.mark.parametrize("layer_ids", [PRE, POST])
def test_modelopt_trains_on_it(tmp_path: Path, layer_ids: tuple[LayerId, ...]) -> None:
    utils = pytest.importorskip("modelopt.torch.speculative.eagle.utils", exc_type=ImportError)
    samples = some_samples(layer_ids)
    paths = write(tmp_path, "modelopt", samples)
    assert sorted(tmp_path.rglob("*.pt")) == sorted(paths), "what its training script looks for"
    dataset = utils.OfflineSupervisedDataset([str(path) for path in paths], answer_only_loss=True)
    batch = utils.EagleOfflineDataCollator(train_len=16)([dataset[i] for i in range(len(dataset))])
    outputs = batch["base_model_outputs"]
    assert outputs["base_hidden_prenorm"] == (layer_ids == PRE)
    for row, sample in enumerate(samples):
        length, states = len(sample.token_ids), sample.hidden_states
        assert batch["input_ids"][row, :length].tolist() == list(sample.token_ids)
        assert batch["loss_mask"][row, :length].tolist() == list(sample.loss_mask or ())
        assert torch.equal(outputs["base_model_hidden_states"][row, :length], states[:, -1])
        assert torch.equal(outputs["aux_hidden_states"][row, :length], states[:, :-1].flatten(1))


def test_a_v1_tensor_has_its_own_bytes_alone(tmp_path: Path) -> None:
    """A view would take the bytes of all layers with it, once for each layer, or in strides."""
    [path, *_] = write(tmp_path, "speculators-v1", some_samples(PRE))
    found = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    for layer in found["hidden_states"]:
        assert layer.is_contiguous()
        assert layer.untyped_storage().nbytes() == layer.numel() * 2
    assert path.stat().st_size < LENGTHS[0] * 4 * HIDDEN * 2 + 8192
