"""demo/compare.py: metrics, table and control on numbers; the whole comparison on a tiny random Llama."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))

from demo import compare
from demo.compare import Errors, LayerId, States

ORDER: list[LayerId] = ["embed", 0, 1, 2, "norm"]


def reference(tokens: int = 50, hidden: int = 16) -> States:
    rng = np.random.default_rng(0)
    return {layer_id: rng.standard_normal((tokens, hidden)).astype(np.float32) for layer_id in ORDER}


def noisy(states: States, size: float, seed: int) -> States:
    rng = np.random.default_rng(seed)
    return {k: (x * (1 + size * rng.standard_normal(x.shape))).astype(np.float32) for k, x in states.items()}


def test_errors_of_equal_states_are_zero() -> None:
    x = reference()[0]
    got = compare.errors(x, x)
    assert (got.rms, got.median) == (0.0, 0.0)
    assert got.min_cosine == pytest.approx(1.0)


def test_errors_by_hand() -> None:
    ref: NDArray[np.float32] = np.array([[3, 4], [0, 1], [1, 0]], np.float32)
    got = compare.errors(np.array([[3, 4], [0, 2], [0, 1]], np.float32), ref)
    assert got.rms == pytest.approx(math.sqrt((0 + 1 + 2) / 3))
    assert got.median == pytest.approx(1.0)
    assert got.min_cosine == pytest.approx(0.0)


def test_a_huge_token_hides_the_others_from_neither_error() -> None:
    ref = np.ones((100, 16), np.float32)
    ref[0] *= 25_000
    wrong = ref.copy()
    wrong[1:] = -1
    got = compare.errors(wrong, ref)
    assert got.rms == pytest.approx(2.0, rel=0.01)
    assert got.median == pytest.approx(2.0)
    assert not got.within(Errors(1e-3, 1e-2, 1.0))


def test_within_allows_twice_and_nothing_that_is_not_a_number() -> None:
    noise = Errors(1e-3, 1e-2, 1.0)
    assert Errors(2e-3, 2e-2, 0.9).within(noise)
    assert not Errors(2.1e-3, 1e-2, 1.0).within(noise)
    assert not Errors(1e-3, 2.1e-2, 1.0).within(noise)
    assert not Errors(math.nan, 1e-2, 1.0).within(noise)


def test_right_states_are_ok_and_the_control_shows() -> None:
    ref = reference()
    results = compare.compare_layers([0, 2, "norm"], noisy(ref, 0.01, 1), ref, noisy(ref, 0.01, 2), ORDER)
    assert [(r.ok, r.control) for r in results] == [(True, "would show")] * 3
    assert results[0].before is not None
    assert results[2].after is None


@pytest.mark.parametrize(("shift", "control"), [(-1, "is the one before"), (1, "is the one after")])
def test_an_off_by_one_is_wrong_and_named(shift: int, control: str) -> None:
    ref = reference()
    ours = noisy(ref, 0.01, 1)
    shifted: States = {k: ours[ORDER[ORDER.index(k) + shift]] for k in ORDER[1:-1]}
    results = compare.compare_layers([0, 1, 2], shifted, ref, noisy(ref, 0.01, 2), ORDER)
    assert [(r.ok, r.control) for r in results] == [(False, control)] * 3


def test_layers_that_hardly_differ_are_said_to_be_in_the_noise() -> None:
    ref = reference()
    ref[1] = noisy({0: ref[0]}, 1e-4, 3)[0]
    (result,) = compare.compare_layers([1], noisy(ref, 0.01, 1), ref, noisy(ref, 0.01, 2), ORDER)
    assert (result.ok, result.control) == (True, "in the noise")


def test_table_has_one_line_per_layer() -> None:
    ref = reference()
    ours = noisy(ref, 0.01, 1)
    ours[2] = ref[0]
    lines = compare.table(compare.compare_layers([0, 2, "norm"], ours, ref, noisy(ref, 0.01, 2), ORDER)).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines] == ["layer", "0", "2", "norm"]
    assert [line.split()[-1] for line in lines] == ["verdict", "ok", "WRONG", "ok"]
    assert "is neither" in lines[2]


def test_spread_takes_both_ends() -> None:
    assert compare.spread(range(24), 4) == [0, 7, 15, 23]
    assert compare.spread([3, 5], 4) == [3, 5]
    assert compare.spread(range(9), 1) == [0]


def test_parse_layer_id() -> None:
    assert compare.parse_layer_id("norm") == "norm"
    assert compare.parse_layer_id("29") == 29
    for text in ("-1", "embed", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="neither"):
            compare.parse_layer_id(text)


LAYERS: list[LayerId] = [0, 1, 3, "norm"]


@pytest.fixture
def extracted(tmp_path: Path) -> Path:
    """A folder with a tiny Llama of 4 layers, a prepared file, and its own bfloat16 states as if extracted."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    samples = [[(7 * row + 3 * i) % 64 for i in range(5 + row)] for row in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in samples))
    for row, ids in enumerate(samples):
        write_states(tmp_path, row, ids, compare.reference_states(tmp_path / "model", "bfloat16", [ids]), LAYERS)
    return tmp_path


def write_states(folder: Path, row: int, ids: list[int], states: States, sources: list[LayerId]) -> None:
    """Write one sample's file; ``sources`` are the layers whose states go under the names ``LAYERS``."""
    import torch
    from safetensors.torch import save_file

    stacked = torch.from_numpy(np.stack([states[k] for k in sources], axis=1)).to(torch.bfloat16)
    tensors = {"hidden_states": stacked, "token_ids": torch.tensor(ids)}
    save_file(tensors, folder / f"hs_{row}.safetensors", metadata={"layer_ids": json.dumps(LAYERS)})


def run(folder: Path, *more: str) -> int:
    paths = ["--model", folder / "model", "--prepared", folder / "data.jsonl", "--states", folder]
    return compare.main([*map(str, paths), *more])


@pytest.mark.filterwarnings("ignore")
def test_states_of_the_same_model_are_ok(extracted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(extracted) == 0
    out = capsys.readouterr().out
    assert "6 of 6 rows have states; compared: rows 0, 1, 3, 5" in out
    assert "all 4 layers ok" in out
    assert run(extracted, "--samples", "2", "--layer-ids", "3", "norm") == 0
    assert "all 2 layers ok" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_shifted_layers_are_wrong(extracted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row, line in enumerate((extracted / "data.jsonl").read_text().splitlines()):
        ids = json.loads(line)["input_ids"]
        states = compare.reference_states(extracted / "model", "bfloat16", [ids])
        write_states(extracted, row, ids, states, [1, 2, "norm", "norm"])
    assert run(extracted) == compare.EXIT_INTEGRITY
    out = capsys.readouterr().out
    assert "WRONG: layer 0, 1, 3" in out
    assert out.count("is the one after") == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["tokens", "layer", "shape", "cut", "none", "not finite"])
def test_unusable_states_are_an_integrity_error(extracted: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = extracted / "hs_0.safetensors"
    ids: list[int] = json.loads((extracted / "data.jsonl").read_text().splitlines()[0])["input_ids"]
    states: dict[Any, Any] = dict.fromkeys(LAYERS, np.ones((len(ids), 32), np.float32))
    more: list[str] = []
    if what == "tokens":
        write_states(extracted, 0, [*ids[:-1], ids[-1] + 1], states, LAYERS)
    elif what == "layer":
        more = ["--layer-ids", "2"]
    elif what == "shape":
        write_states(extracted, 0, ids, {k: x[:-1] for k, x in states.items()}, LAYERS)
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "not finite":
        write_states(extracted, 0, ids, {k: x * np.nan for k, x in states.items()}, LAYERS)
    else:
        for file in extracted.glob("hs_*"):
            file.unlink()
    wanted = {
        "tokens": "token_ids are not",
        "layer": "no layer 2; it has 0, 1, 3, norm",
        "shape": "wanted [5, 4, hidden_size]",
        "cut": "hs_0.safetensors",
        "none": "no hs_*.safetensors of the 6 rows",
        "not finite": "not finite",
    }
    assert run(extracted, *more) == compare.EXIT_INTEGRITY
    assert wanted[what] in capsys.readouterr().err


def test_an_unusable_prepared_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"tokens": []}\n')
    assert run(tmp_path) == compare.EXIT_INPUT
