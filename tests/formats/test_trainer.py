"""What the table says of this release, asked of the release: its datasets, and the final state its trainer wants."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import Row
from trainer import DATA, collate, draft_model, load_samples
from writers import WRITERS

from conftest import RELEASE
from vllm_compat._detect.speculators import SpeculatorsRelease

VOCABULARY, WIDTH, LAYERS = 64, 8, 6
AUXILIARY = (1, 3, 4)


class TargetsAreThere(Exception):  # noqa: N818 - nothing is wrong
    """Raised once the trainer has its targets: the draft's attention takes more than a CPU has."""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose final norm is no identity."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 3.0)
    folder = tmp_path_factory.mktemp("verifier")
    model.save_pretrained(folder)
    return folder


def states_of(verifier: Path, rows: Sequence[Row], final: str) -> tuple[list[Row], list[torch.Tensor]]:
    """The rows with the verifier's own states, and the logits [tokens, vocabulary] of each."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(verifier).eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    made, logits = [], []
    for row in rows:
        token_ids = row.token_ids % VOCABULARY
        with torch.no_grad():
            out = model(token_ids.unsqueeze(0), output_hidden_states=True)
        last = {"pre-norm": before_norm.pop(), "post-norm": out.hidden_states[-1][0]}[final]
        layers = [out.hidden_states[k + 1][0] for k in AUXILIARY]
        made.append(Row(token_ids, row.loss_mask, torch.stack([*layers, last], dim=1)))
        logits.append(out.logits[0])
    return made, logits


def targets_of(batch: dict[str, Any], verifier: Path) -> torch.Tensor:
    """What this release's EAGLE-3 trainer trains towards: [places, vocabulary]."""
    model = draft_model(verifier).float()
    found: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        found.append(output[0])
        raise TargetsAreThere

    model.verifier_lm_head.register_forward_hook(keep)
    accepted = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    with pytest.raises(TargetsAreThere):
        model(**{name: value for name, value in batch.items() if name in accepted})
    return found[0]


def test_the_table_names_every_dataset_of_the_release(release: SpeculatorsRelease) -> None:
    own = {
        name
        for name, value in vars(DATA).items()
        if inspect.isclass(value) and value.__module__ == DATA.__name__ and name.endswith("Dataset")
    }
    listed = {reader for reader in release.readers.values() if reader.startswith(DATA.__name__)}
    assert {f"{DATA.__name__}.{name}" for name in own - {"BaseDataset"}} == listed


@pytest.mark.parametrize("final", ["pre-norm", "post-norm"])
@pytest.mark.parametrize("name", [name for name in ("speculators-v1", "speculators") if name in RELEASE.formats])
def test_targets_are_the_verifiers_logits_with_the_final_state_of_the_table_alone(
    name: str, final: str, release: SpeculatorsRelease, rows: Sequence[Row], verifier: Path, tmp_path: Path
) -> None:
    made, logits = states_of(verifier, rows, final)
    WRITERS[name]["reference"](tmp_path / "data", made)
    samples = load_samples(name, tmp_path / "data", release, hidden_states_dtype=torch.float32)
    targets = targets_of(collate(samples, sum(len(row) - 1 for row in made), torch.float32), verifier)
    wanted = torch.cat([one[1:] for one in logits])
    error = (targets - wanted).abs().max() / wanted.abs().max()
    assert (error < 1e-4) == (final == release.formats[name])
    assert (error < 1e-4) or error > 0.05
