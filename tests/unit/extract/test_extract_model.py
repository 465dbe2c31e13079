"""What is known of a model before it is loaded, and the layer ids that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.extract.model import ModelFacts, choose_layer_ids, read_model_facts
from vllm_compat.types import LayerId


def folder(tmp_path: Path, config: Any) -> str:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return str(tmp_path)


def test_facts_of_a_plain_model(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 129280, "max_position_embeddings": 163840}
    assert read_model_facts(folder(tmp_path, config)) == ModelFacts(61, 7168, 129280, 163840)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"n_layer": 12, "n_embd": 768, "n_positions": 1024, "n_ctx": 512, "vocab_size": 99}, (12, 768, 99, 1024)),
        ({"n_layer": 28, "n_embd": 4096, "n_ctx": 2048, "vocab_size": 50400}, (28, 4096, 50400, 2048)),
        ({"n_layer": 70, "n_embed": 14336, "seq_length": 2048, "vocab_size": 250880}, (70, 14336, 250880, 2048)),
        ({"n_layer": 24, "hidden_size": 1024, "n_head": 16, "vocab_size": 250880}, (24, 1024, 250880, None)),
        ({"n_layers": 32, "d_model": 4096, "max_seq_len": 2048, "vocab_size": 50432}, (32, 4096, 50432, 2048)),
        (
            {"num_layers": 28, "hidden_size": 4096, "padded_vocab_size": 65024, "seq_length": 8192},
            (28, 4096, 65024, 8192),
        ),
        ({"text_config": {"n_layer": 6, "n_embd": 64}, "num_hidden_layers": 61, "vocab_size": 9}, (6, 64, 9, None)),
        ({"num_hidden_layers": 4, "n_layer": 5, "num_layers": 6}, (4, None, None, None)),
    ],
    ids=["GPT-2", "GPT-J", "Bloom", "Falcon-RW", "MPT", "ChatGLM", "in its text_config", "the usual name first"],
)
def test_other_names_of_the_same(
    tmp_path: Path, config: dict[str, Any], wanted: tuple[int | None, int | None, int | None, int | None]
) -> None:
    assert read_model_facts(folder(tmp_path, config)) == ModelFacts(*wanted)


def test_text_config_comes_first(tmp_path: Path) -> None:
    config = {"hidden_size": 1, "vocab_size": 99, "text_config": {"num_hidden_layers": 36, "hidden_size": 2560}}
    assert read_model_facts(folder(tmp_path, config)) == ModelFacts(36, 2560, 99, None)


def test_values_that_are_no_numbers_are_unknown(tmp_path: Path) -> None:
    config = {"num_hidden_layers": None, "hidden_size": "64", "vocab_size": True, "text_config": None}
    assert read_model_facts(folder(tmp_path, config)) == ModelFacts()


@pytest.mark.parametrize("config", ["{", "[]", "\ufeff{}"])
def test_an_unreadable_config(tmp_path: Path, config: str) -> None:
    facts = read_model_facts(folder(tmp_path, config))
    assert facts.num_layers is None
    assert "config.json" in facts.why_unknown
    assert choose_layer_ids((5, "norm"), facts) == (5, "norm")
    with pytest.raises(UsageError, match=r"config\.json.*Give --layer-ids"):
        choose_layer_ids(None, facts)


def test_a_name_that_is_no_folder(tmp_path: Path) -> None:
    facts = read_model_facts(str(tmp_path / "missing"))
    with pytest.raises(UsageError, match=r"no local folder.*Give --layer-ids"):
        choose_layer_ids(None, facts)


def test_a_name_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    folder(snapshot, {"num_hidden_layers": 61})
    assert read_model_facts("some/model", {"revision": "0" * 40}).num_layers == 61
    assert "hub's cache" in read_model_facts("some/model").why_unknown


@pytest.mark.parametrize(("n", "expected"), [(61, (2, 30, 58, 60)), (32, (2, 16, 29, 31)), (8, (2, 4, 5, 7))])
def test_default_layer_ids(n: int, expected: tuple[LayerId, ...]) -> None:
    assert choose_layer_ids(None, ModelFacts(num_layers=n)) == expected


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_no_default_for_a_small_model(n: int) -> None:
    with pytest.raises(UsageError, match=rf"do not suit a model of {n} layers"):
        choose_layer_ids(None, ModelFacts(num_layers=n))


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        ((8,), ModelFacts(num_layers=8)),
        ((-1,), ModelFacts(num_layers=8)),
        ((-1,), ModelFacts()),
        ((3, 3), ModelFacts()),
        (("norm", "norm"), ModelFacts()),
        ((), ModelFacts(num_layers=8)),
    ],
)
def test_layer_ids_that_cannot_be(asked: tuple[LayerId, ...], facts: ModelFacts) -> None:
    with pytest.raises(UsageError):
        choose_layer_ids(asked, facts)
