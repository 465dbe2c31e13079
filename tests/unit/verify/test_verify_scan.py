"""Every kind of damage is found, and the sample is named with its file and its line of the input."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.unit.verify.conftest import HIDDEN, words

from vllm_compat.convert import ConvertConfig, convert
from vllm_compat.extract.checksum import xxh3
from vllm_compat.extract.journal import Entry, encode_entry, entry_at, parse_journal
from vllm_compat.formats import SampleData, get_format

if TYPE_CHECKING:
    from tests.unit.verify.conftest import MakeRun, Verify

JOURNAL = "journal-0-of-1.jsonl"


def entries(folder: Path) -> dict[int, Entry]:
    lines = (folder / JOURNAL).read_bytes()
    offsets = [offset for offset, _ in parse_journal([lines], folder / JOURNAL, 1000)]
    return {entry.index: entry for entry in (entry_at(BytesIO(lines), offset) for offset in offsets)}


def write_journal(folder: Path, found: dict[int, Entry]) -> None:
    (folder / JOURNAL).write_bytes(b"".join(map(encode_entry, found.values())))


def rewrite(folder: Path, index: int, change: Callable[[SampleData], dict[str, Any]]) -> None:
    """Another sample's file in the place of one, with a journal line that vouches for it."""
    form = get_format("safetensors")
    path = folder / f"hs_{index}.safetensors"
    sample = form.decode(path, index)
    fields = {name: getattr(sample, name) for name in SampleData.__slots__} | change(sample)
    if "layer_ids" in change(sample):
        fields["metadata"] = {k: v for k, v in sample.metadata.items() if k != "layer_ids"}
    data = b"".join(bytes(part) for part in form.encode(SampleData(**fields)))
    path.write_bytes(data)
    found = entries(folder)
    line = found[index]
    found[index] = Entry(
        index, line.file, len(data), xxh3([data]), len(fields["token_ids"]), line.sampled, fields["id"]
    )
    write_journal(folder, found)


def test_a_good_run_is_good(make_run: MakeRun, check: Verify) -> None:
    verdict = check(make_run())
    assert words(verdict) == []
    assert (verdict.exit_code, verdict.complete, verdict.scan.good, verdict.scan.read) == (0, True, 7, 7)
    assert verdict.input_why_not == ""
    assert verdict.scan.bytes == sum(path.stat().st_size for path in verdict.run.folder.glob("hs_*"))


def _flip(folder: Path) -> None:
    path = folder / "hs_3.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)


def _cut(folder: Path) -> None:
    path = folder / "hs_3.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _swap(folder: Path) -> None:
    a, b, spare = folder / "hs_3.safetensors", folder / "hs_4.safetensors", folder / "spare"
    for source, target in ((a, spare), (b, a), (spare, b)):
        source.rename(target)


def _replace_by_a_folder(folder: Path) -> None:
    (folder / "hs_3.safetensors").unlink()
    (folder / "hs_3.safetensors").mkdir()


def _states(folder: Path, change: Callable[[Any], Any]) -> None:
    def changed(sample: SampleData) -> dict[str, Any]:
        return {"hidden_states": change(np.array(sample.hidden_states.tolist(), dtype=np.float32))}

    rewrite(folder, 3, changed)


def _with_nan(states: Any) -> Any:
    states[1, 2, 5] = np.nan
    return states


def _with_infinity(states: Any) -> Any:
    states[-1, 0, HIDDEN - 1] = -np.inf
    return states


WHERE = r"sample 3, line 5 of the input, hs_3\.safetensors: "


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (_flip, "it is not what was written: its xxh3 is [0-9a-f]{16}, [0-9a-f]{16} was written"),
        (_cut, r"it has \d+ bytes, \d+ were written"),
        (lambda f: (f / "hs_3.safetensors").unlink(), "the file is gone"),
        (_replace_by_a_folder, "it cannot be read: "),
        (
            lambda f: rewrite(f, 3, lambda s: {"layer_ids": (0, 2, "norm")}),
            "its layers are 0 2 norm, the run's 2 0 norm",
        ),
        (
            lambda f: rewrite(f, 3, lambda s: {"token_ids": (*s.token_ids[:-1], 999)}),
            r"its tokens are not the input's: (\d+) and \1 of them, different from position \d+ on",
        ),
        (
            lambda f: rewrite(f, 3, lambda s: {"loss_mask": (0,) * len(s.token_ids)}),
            "its loss mask is not the input's",
        ),
        (lambda f: rewrite(f, 3, lambda s: {"id": "other"}), "the journal's id is 'other', the input's 'r3'"),
        (lambda f: rewrite(f, 3, lambda s: {"index": 4}), "its metadata says index '4', wanted '3'"),
        (
            lambda f: rewrite(f, 3, lambda s: {"metadata": {**s.metadata, "post_norm": "[false, false, false]"}}),
            r"its metadata says post_norm '\[false, false, false\]', wanted '\[false, false, true\]'",
        ),
        (
            lambda f: rewrite(f, 3, lambda s: {"metadata": {**s.metadata, "model_revision": "xxh3:0"}}),
            "its metadata says model_revision 'xxh3:0', wanted 'xxh3:",
        ),
        (lambda f: _states(f, _with_nan), "the state of token 1 at layer id norm is not finite"),
        (lambda f: _states(f, _with_infinity), r"the state of token \d+ at layer id 2 is not finite"),
        (lambda f: _states(f, lambda s: s.astype(np.float16)), "its states are float16, the run's float32"),
        (lambda f: _states(f, lambda s: s[..., :-1]), "its states have the width 7, 8 is the model's"),
    ],
)
def test_damage_is_named(make_run: MakeRun, check: Verify, damage: Callable[[Path], Any], wanted: str) -> None:
    folder = make_run()
    damage(folder)
    verdict = check(folder)
    assert verdict.exit_code == 5
    named = [text for text in words(verdict) if re.match(WHERE + wanted, text)]
    assert len(named) == 1, words(verdict)
    assert verdict.num_bad_samples == 1
    assert verdict.scan.good == 6


def test_swapped_files_say_whose_they_are(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    _swap(folder)
    verdict = check(folder)
    assert verdict.exit_code == 5
    assert verdict.num_bad_samples == 2
    texts = words(verdict)
    assert any(text.startswith("sample 3") and "its metadata says index '4', wanted '3'" in text for text in texts)
    assert any(text.startswith("sample 4") and "its metadata says index '3', wanted '4'" in text for text in texts)


def test_swapped_files_of_one_size_are_seen_by_their_bytes(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    found = entries(folder)
    shutil.copy(folder / "hs_3.safetensors", folder / "hs_4.safetensors")
    found[4] = Entry(**{name: getattr(found[4], name) for name in Entry.__slots__} | {"bytes": found[3].bytes})
    write_journal(folder, found)
    texts = words(check(folder))
    assert any("sample 4" in text and "not what was written" in text for text in texts)
    assert any("its metadata says index '3', wanted '4'" in text for text in texts)
    assert any("its id is 'r3', the journal says 'r4'" in text for text in texts)


def test_a_missing_sample_of_a_complete_run_is_named(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    found = entries(folder)
    del found[3]
    write_journal(folder, found)
    verdict = check(folder)
    assert verdict.exit_code == 5
    assert words(verdict)[0].startswith("sample 3, line 5 of the input: it is missing")
    assert not any("none of this run's" in text for text in words(verdict))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hs_7.safetensors", "none of this run's"),
        ("deep/below/other.safetensors", "none of this run's"),
        (".hs_3.tmp-0-of-1-0123abcd", "left that was killed"),
        (".dataset.tmp/rows.arrow", "left that was killed"),
    ],
)
def test_foreign_files_and_leftovers_are_named(make_run: MakeRun, check: Verify, name: str, wanted: str) -> None:
    folder = make_run()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    (text,) = words(check(folder))
    assert text.startswith(f"{name}: ")
    assert wanted in text


def test_files_that_no_reader_takes_for_samples_may_be_there(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    (folder / "notes.txt").write_text("mine")
    assert check(folder).exit_code == 0


def test_the_record_must_say_what_the_journals_do(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    record = json.loads((folder / "run.json").read_text())
    record["summary"]["tokens"] += 1
    record["identity"]["input_xxh3"] = "0" * 16
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "draft_config.json").write_text('{"eagle_aux_hidden_state_layer_ids": [2, 0]}')
    texts = words(check(folder))
    assert any(text.startswith("run.json: its summary says tokens") for text in texts)
    assert any(text.startswith("run.json: identity says xxh3") for text in texts)
    assert any(text.startswith("draft_config.json: it says") for text in texts)
    (folder / "draft_config.json").unlink()
    assert any(text.startswith("draft_config.json: it is gone") for text in words(check(folder)))


def test_every_flipped_bit_is_found(make_run: MakeRun, check: Verify) -> None:
    folder = make_run(rows=2)
    rng = random.Random(0)
    paths = [folder / "hs_0.safetensors", folder / "hs_1.safetensors", folder / JOURNAL]
    for n in range(300):
        path = paths[n % 3]
        good = path.read_bytes()
        data = bytearray(good)
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert check(folder, jobs=1).exit_code == 5, (path, bit)
        path.write_bytes(good)
    assert check(folder).exit_code == 0


@pytest.mark.parametrize("format_name", ["per-layer", "safetensors"])
@pytest.mark.parametrize("jobs", [1, 3])
def test_any_format_and_any_number_of_threads(make_run: MakeRun, check: Verify, format_name: str, jobs: int) -> None:
    folder = make_run(40, format=format_name)
    assert check(folder, jobs=jobs).scan.good == 40
    data = bytearray((folder / "hs_30.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "hs_30.safetensors").write_bytes(data)
    (problem,) = check(folder, jobs=jobs).first
    assert (problem.index, problem.line, problem.file) == (30, 32, "hs_30.safetensors")


@pytest.mark.parametrize("format_name", ["speculators-v1", "specforge", "modelopt", "eagle"])
def test_archives(model_run: MakeRun, check: Verify, format_name: str) -> None:
    pytest.importorskip("transformers")
    layer_ids = ("norm",) if format_name == "eagle" else (0, 1, 2, "norm")
    folder = model_run("llama", layer_ids, rows=5, format=format_name)
    verdict = check(folder)
    assert (verdict.exit_code, words(verdict), verdict.scan.good) == (0, [], 5)
    assert verdict.self_checks[0].agree == 5
    suffix = verdict.run.format.file(0, None).suffix
    (folder / f"foreign{suffix}").write_bytes(b"x")
    assert len(words(check(folder))) == 1


def test_a_converted_run_is_a_run(make_run: MakeRun, check: Verify, tmp_path: Path) -> None:
    convert(ConvertConfig(make_run(), tmp_path / "converted", "per-layer", layer_ids=("norm", 2)))
    verdict = check(tmp_path / "converted")
    assert (verdict.exit_code, words(verdict), verdict.scan.good) == (0, [], 7)
    assert verdict.input_why_not == ""
