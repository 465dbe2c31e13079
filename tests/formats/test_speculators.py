"""An arrow dataset and ``hidden_states/hs_{i}.safetensors``, as the releases from 0.5 on read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from reference_writer import write_arrow, write_speculators
from rows import VOCABULARY, Row, as_batch, flip_sign
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from trainer import collate, find, load_samples, matches, open_arrow
from writers import WRITERS

from vllm_compat._detect.speculators import SpeculatorsRelease

_WRITERS = WRITERS["speculators"]


@pytest.fixture(params=_WRITERS.values(), ids=list(_WRITERS))
def folder(request: pytest.FixtureRequest, rows: Sequence[Row], tmp_path: Path) -> Path:
    request.param(tmp_path / "data", rows)
    return tmp_path / "data"


def test_a_dataset_that_was_not_split_is_what_was_written(
    folder: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    dataset = open_arrow(folder, release, share=None)
    assert len(dataset) == len(rows)
    if "split-only" in release.faults:
        with pytest.raises(AttributeError, match="start_file_idx"):
            dataset[0]
    else:
        assert [at for at, row in enumerate(rows) if not matches(dataset[at], row)] == []


def test_lengths_are_exact(folder: Path, rows: Sequence[Row], release: SpeculatorsRelease) -> None:
    found = [n for part in ("train", "val") for n in open_arrow(folder, release, part=part).approx_lengths]
    assert list(map(int, found)) == [len(row) for row in rows]


def test_the_draft_vocabulary_is_that_of_the_most_frequent_answers(
    folder: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    build = find("speculators.train.vocab_mapping.build_vocab_mappings_from_distribution")
    counted = torch.load(folder / "token_freq.pt", weights_only=True)
    answers = Counter(t for row in rows for t in row.token_ids[row.loss_mask == 1].tolist())
    d2t, t2d = build(token_freq_dict=counted, draft_vocab_size=8, target_vocab_size=VOCABULARY)
    kept = t2d.nonzero().flatten().tolist()
    assert (torch.arange(8) + d2t).tolist() == kept
    assert sorted((answers[t] for t in kept), reverse=True) == [n for _, n in answers.most_common(8)]


def test_states_of_other_tokens_are_left_out_with_a_warning(
    tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    write_speculators(tmp_path / "data", rows)
    states = tmp_path / "data" / "hidden_states"
    (states / "hs_0.safetensors").replace(states / "hs_1.safetensors")
    dataset = open_arrow(tmp_path / "data", release)
    with pytest.warns(UserWarning, match="match input ids"):
        left_out = dataset[1]
    batch = collate([left_out, dataset[2]], 40)
    assert torch.equal(batch["input_ids"], as_batch([rows[2]], 40)["input_ids"])


def test_a_missing_file_is_an_error_where_that_is_asked_for(
    tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    write_arrow(tmp_path / "data", rows)
    with pytest.raises(RuntimeError, match="Failed to load hidden states for sample 0"):
        open_arrow(tmp_path / "data", release)[0]


@pytest.mark.parametrize("writer", ["reference", "ours"])
def test_float8_is_read_without_its_scales_by_the_default_reader(
    writer: str, tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    assert "fp8-unscaled" in release.faults
    WRITERS["speculators-fp8"][writer](tmp_path / "data", rows)
    file = load_file(tmp_path / "data" / "hidden_states" / "hs_0.safetensors")
    unscaled = file["hidden_states"].to(torch.bfloat16)
    batch = collate(load_samples("speculators", tmp_path / "data", release)[:1], len(rows[0]) - 1)
    assert torch.equal(batch["hidden_states"][0].to(torch.bfloat16), unscaled[:-1, :-1].flatten(1))
    assert unscaled.abs().max() > 50 * rows[0].states.abs().max()


@pytest.mark.parametrize("states", ["one layer too few", "the layers in reverse"])
def test_wrong_layers_are_noticed_by_nobody(
    states: str, tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    assert "states-unchecked" in release.faults
    write_speculators(tmp_path / "data", rows)
    wrong = rows[0].states[:, 1:] if states == "one layer too few" else rows[0].states.flip(1)
    tensors = {"hidden_states": wrong.contiguous(), "token_ids": rows[0].token_ids}
    save_file(tensors, tmp_path / "data" / "hidden_states" / "hs_0.safetensors")
    sample = open_arrow(tmp_path / "data", release)[0]
    assert torch.equal(sample["hidden_states"].to(torch.bfloat16), wrong[:, :-1].flatten(1))


def test_a_flipped_bit_is_noticed_by_nobody(tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease) -> None:
    assert "states-unchecked" in release.faults
    write_speculators(tmp_path / "data", rows)
    flip_sign(tmp_path / "data" / "hidden_states" / "hs_0.safetensors", rows[0].states)
    state = open_arrow(tmp_path / "data", release)[0]["verifier_last_hidden_states"][-1, -1]
    assert state == -rows[0].states[-1, -1, -1]


def test_a_file_that_was_cut_short_is_an_error(
    tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    write_speculators(tmp_path / "data", rows)
    file = tmp_path / "data" / "hidden_states" / "hs_0.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(SafetensorError):
        open_arrow(tmp_path / "data", release)[0]
