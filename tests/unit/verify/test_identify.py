"""Files of anybody's tool: each tensor is called by what it is, in whatever shape a tool keeps it."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.verify.conftest import VOCABULARY, forward

from vllm_compat.errors import UsageError, VllmCompatError
from vllm_compat.identify import identify
from vllm_compat.identify.__main__ import main
from vllm_compat.identify.files import ForeignFileError, choose_files

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

Pack = Callable[[Any, Sequence[Any]], dict[str, Any]]

SHAPES: dict[str, tuple[str, Pack, list[str]]] = {
    "a list": ("data_{}.pt", lambda i, h: {"input_ids": i, "hidden_states": h}, ["hidden_states[{}]"]),
    "stacked": (
        *("hidden_states/hs_{}.safetensors", lambda i, h: {"token_ids": i, "hidden_states": torch.stack(h, 1)}),
        ["hidden_states[{}]"],
    ),
    "side by side, in a batch of one": (
        "rows_0-2000/data_{}.ckpt",
        lambda i, h: {
            "input_ids": i.unsqueeze(0),
            "aux_hidden_state": torch.cat(list(h[:-1]), -1).unsqueeze(0),
            "hidden_state": h[-1].unsqueeze(0),
            "loss_mask": torch.ones(1, len(i)),
        },
        ["aux_hidden_state[{}]", "aux_hidden_state[{}]", "hidden_state"],
    ),
    "by layer": (
        *("hs_{}.safetensors", lambda i, h: {"token_ids": i, **{f"layer_{n}": s for n, s in enumerate(h)}}),
        ["layer_{}"],
    ),
}


@pytest.fixture
def llama(save_model: Callable[[str], Path]) -> Path:
    return save_model("llama")


@pytest.fixture
def write(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """``write((1, 3, "norm"))``: the folder of seven samples of these states, kept as a tool keeps them."""

    def make(
        layer_ids: Sequence[Any], shape: str = "a list", alter: Callable[[int, list[Any]], list[Any]] = lambda _, h: h
    ) -> Path:
        model = transformers.AutoModelForCausalLM.from_pretrained(llama).to(torch.bfloat16)
        name, pack, _ = SHAPES[shape]
        rng = random.Random(3)
        for n in range(7):
            token_ids = [rng.randrange(VOCABULARY) for _ in range(5 + 6 * n)]
            states, _ = forward(model, token_ids)
            fields = pack(torch.tensor(token_ids), alter(n, [states[k].contiguous() for k in layer_ids]))
            path = tmp_path / "files" / name.format(n)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                from safetensors.torch import save_file

                save_file({k: v.contiguous() for k, v in fields.items()}, path)
            else:
                torch.save(fields, path)
        return tmp_path / "files"

    return make


@pytest.mark.parametrize("last", [4, "norm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_tensor_is_called_by_its_layer_and_its_side_of_the_norm(
    write: Callable[..., Path], llama: Path, shape: str, last: Any
) -> None:
    found = identify(write((0, 3, last), shape), str(llama))
    assert found.layer_ids == (0, 3, last)
    names = SHAPES[shape][2]
    assert [e.name for e in found.entries] == [names[min(n, len(names) - 1)].format(n) for n in range(3)]
    assert (found.num_files, len(found.samples), found.num_layers) == (7, 4, 5)
    for entry in found.entries:
        assert entry.error <= entry.bound < entry.nearest_error / 4


def test_the_command_says_it_in_words(
    write: Callable[..., Path], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write((3, 1, "norm")))
    assert main([folder, "--model", str(llama), "--samples", "2", "--expect", "3", "1", "norm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 of 7 files computed again: ")
    assert "hidden_states[0]  layer 3" in out
    assert "norm (the last state, after the final norm)" in out
    assert "apply the norm again" in out
    assert main([folder, "--model", str(llama), "--expect", "3", "2", "4"]) == 5
    out = capsys.readouterr().out
    assert "layer 1, and not 2" in out
    assert "after the final norm), and not 4" in out
    assert main([folder, "--model", str(llama), "--json"]) == 0
    assert [e["holds"] for e in json.loads(capsys.readouterr().out)["entries"]] == [3, 1, "norm"]


def test_the_embeddings_and_nothing_of_the_model(
    write: Callable[..., Path], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write((0, 2), alter=lambda _, h: [h[0] * 1.1, h[1]])
    assert identify(folder, str(llama)).layer_ids == (None, 2)
    assert main([str(folder), "--model", str(llama)]) == 5
    assert "no state of this model" in capsys.readouterr().out


def test_one_sample_that_is_another_than_the_rest_shows(
    write: Callable[..., Path], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write((1, 4), alter=lambda n, h: h[::-1] if n == 5 else h)
    found = identify(folder, str(llama), samples=99)
    assert found.layer_ids == (None, None)
    assert found.entries[0].by_sample == (1, 1, 1, 1, 1, 4, 1)
    assert main([str(folder), "--model", str(llama), "--samples", "7"]) == 5
    assert "not the same in each: 1, 1, 1, 1, 1, 4, 1" in capsys.readouterr().out


def test_rows_of_another_sample_are_no_state(write: Callable[..., Path], llama: Path) -> None:
    folder = write((1, 4), alter=lambda _, h: [s.flip(0) for s in h])
    assert identify(folder, str(llama)).layer_ids == (None, None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_states": [torch.ones(3, 64)]}, "it has none of input_ids, token_ids, only hidden_states"),
        ({"input_ids": torch.arange(3)}, "no tensor of width 64 for 3 tokens"),
        ({"input_ids": torch.arange(3), "hidden_states": torch.ones(3, 65)}, "no tensor of width 64"),
        ({"input_ids": torch.arange(3), "hidden_states": torch.ones(4, 64)}, "for 3 tokens"),
        ({"input_ids": torch.arange(3), "h": torch.ones(3, 64).to(torch.float8_e4m3fn)}, "without its scales"),
        ([1], "it holds a list, wanted a dictionary"),
    ],
)
def test_a_file_that_is_no_sample_is_named(fields: Any, words: str, llama: Path, tmp_path: Path) -> None:
    torch.save(fields, tmp_path / "data_0.pt")
    with pytest.raises(ForeignFileError, match=words) as caught:
        identify(tmp_path, str(llama))
    assert caught.value.path == str(tmp_path / "data_0.pt")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


def test_code_in_a_file_is_not_run(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"input_ids": Evil()}, tmp_path / "data_0.pt", pickle_module=pickle)
    assert main([str(tmp_path), "--model", str(llama)]) == 4
    assert "data_0.pt" in capsys.readouterr().err
    assert not (tmp_path / "touched").exists()


def test_files_of_other_entries_are_named(write: Callable[..., Path], llama: Path) -> None:
    folder = write((1, 4), alter=lambda n, h: h[:1] if n == 6 else h)
    with pytest.raises(ForeignFileError, match=r"data_6\.pt: it has the entries hidden_states\[0\], others"):
        identify(folder, str(llama), samples=7)


def test_what_is_no_sample_is_not_taken_for_one(tmp_path: Path) -> None:
    for name in ("token_freq.pt", "optimizer.pt", "run.json", "data_3.pt", "below/hs_1.safetensors", "data_3.pt.tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    paths, count = choose_files(tmp_path, 9, 0)
    assert [path.name for path in paths] == ["hs_1.safetensors", "data_3.pt"]
    assert count == 2
    with pytest.raises(UsageError, match="has no samples"):
        choose_files(tmp_path / "none", 9, 0)


@pytest.mark.parametrize("arguments", [["--samples", "0"], ["--expect", "x"], []])
def test_usage(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path), *(["--model", "m"] if arguments else []), *arguments])
    assert end.value.code == 2


def test_a_model_that_is_not_here_and_a_wrong_number_of_ids(
    write: Callable[..., Path], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write((1, 4)))
    assert main([folder, "--model", str(tmp_path / "none")]) == 2
    assert "hidden_size is wanted" in capsys.readouterr().err
    assert main([folder, "--model", str(llama), "--expect", "1"]) == 2
    assert "1 ids are expected of 2 entries: hidden_states[0], hidden_states[1]" in capsys.readouterr().err
    assert issubclass(ForeignFileError, VllmCompatError)
