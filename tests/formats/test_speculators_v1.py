"""``data_{i}.pt``, as the releases up to 0.7 read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from reference_writer import write_speculators_v1
from rows import Row, flip_sign
from trainer import DATA, SHARE, SHIFTS_ITSELF, numbers, open_files
from writers import WRITERS

from vllm_compat._detect.speculators import SpeculatorsRelease

_WRITERS = WRITERS["speculators-v1"]


@pytest.fixture(params=_WRITERS.values(), ids=list(_WRITERS))
def folder(request: pytest.FixtureRequest, rows: Sequence[Row], tmp_path: Path) -> Path:
    request.param(tmp_path / "data", rows)
    return tmp_path / "data"


def test_the_trainers_own_split_has_every_sample_once(
    folder: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    train, val = DATA.split_files(str(folder), ratio=SHARE)
    assert (len(train), len(val)) == (9, 3)
    assert sorted(map(str, train + val)) == sorted(str(folder / f"data_{at}.pt") for at in range(len(rows)))


def test_lengths_are_exact_or_guessed_from_the_size_of_a_file(
    folder: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    dataset = open_files(folder, release)
    exact = [len(rows[number]) for number in numbers(dataset)]
    assert (dataset.approx_lengths != exact) == ("lengths-guessed" in release.faults)


def test_a_lost_file_of_lengths_makes_them_a_guess(
    tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    write_speculators_v1(tmp_path / "data", rows)
    (tmp_path / "data" / "sample_lengths.json").unlink()
    dataset = open_files(tmp_path / "data", release)
    assert dataset.approx_lengths != [len(rows[number]) for number in numbers(dataset)]


@pytest.mark.parametrize("name", ["token_freq.pt", "below/draft.ckpt", "data_0.tmp.pt"])
def test_every_file_whose_name_ends_in_pt_is_taken_for_a_sample(
    name: str, tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    assert "every-pt" in release.faults
    write_speculators_v1(tmp_path / "data", rows)
    stranger = tmp_path / "data" / name
    stranger.parent.mkdir(exist_ok=True)
    torch.save({5: 1}, stranger)
    files = DATA.list_files(str(tmp_path / "data"))
    assert stranger in files


@pytest.mark.parametrize("states", ["one layer too few", "the layers in reverse"])
def test_wrong_layers_are_noticed_by_nobody(
    states: str, tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    assert "states-unchecked" in release.faults
    first = rows[0]
    wrong = first.states[:, 1:] if states == "one layer too few" else first.states.flip(1)
    write_speculators_v1(tmp_path / "data", [Row(first.token_ids, first.loss_mask, wrong)])
    sample = open_files(tmp_path / "data", release)[0]
    before = slice(None, -1) if SHIFTS_ITSELF else slice(None)
    assert torch.equal(sample["hidden_states"].to(torch.bfloat16), wrong[before, :-1].flatten(1))


def test_a_flipped_bit_is_noticed_by_nobody(tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease) -> None:
    assert "states-unchecked" in release.faults
    write_speculators_v1(tmp_path / "data", rows[:1])
    flip_sign(tmp_path / "data" / "data_0.pt", rows[0].states[:, -1].contiguous())
    state = open_files(tmp_path / "data", release)[0]["verifier_last_hidden_states"][-1, -1]
    assert state == -rows[0].states[-1, -1, -1]
