"""The installed speculators: its own dataset, collate function and draft model, whatever this release calls them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rows import HIDDEN_SIZE, Row, as_sample

from vllm_compat._detect.speculators import SpeculatorsRelease

__all__ = [
    "DATA",
    "SHARE",
    "SHIFTS_ITSELF",
    "collate",
    "document_ids",
    "draft_model",
    "find",
    "load_samples",
    "matches",
    "numbers",
    "open_arrow",
    "open_files",
]

DATA: ModuleType = import_module("speculators.train.data")
SHIFTS_ITSELF = hasattr(DATA, "shift_batch")
"""Whether the dataset shifts its samples; else the collate function is given what does."""
SHARE = 0.75
"""Of the rows, for training."""


def find(dotted: str) -> Any:
    """The object of ``package.module.Name``."""
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)


def open_files(folder: Path, release: SpeculatorsRelease, **options: Any) -> Any:
    """A dataset over ``data_{i}.pt``."""
    return find(release.readers["speculators-v1"])(max_len=1024, datapath=str(folder), **options)


def numbers(dataset: Any) -> list[int]:
    """The number in the name of each file of a dataset, which has them as the file system lists them."""
    return [int(Path(file).stem.removeprefix("data_")) for file in dataset.data]


def open_arrow(
    folder: Path,
    release: SpeculatorsRelease,
    share: float | None = SHARE,
    part: str = "train",
    **options: Any,
) -> Any:
    """A dataset over arrow and safetensors files, which asks no server for missing ones.

    Args:
        folder: what was written.
        release: its row of the table.
        share: of the rows that are for training; None: all, and no word of a split.
        part: ``train`` or ``val``.
        options: more arguments of the class.
    """
    kind = find(release.readers["speculators"])
    if share is not None:
        one_number = "split_ratio" in inspect.signature(kind).parameters
        split = {"train": share, "val": share - 1}[part]
        options |= {"split_ratio": split} if one_number else {"train_ratio": share, "split": part}
    return kind(max_len=1024, datapath=str(folder), on_missing="raise", **options)


def load_samples(name: str, folder: Path, release: SpeculatorsRelease, **options: Any) -> list[Any]:
    """Every sample of a folder of the format ``name``, in the order that it was written in."""
    if name == "speculators-v1":
        dataset = open_files(folder, release, **options)
        return [dataset[at] for _, at in sorted((number, at) for at, number in enumerate(numbers(dataset)))]
    parts = [open_arrow(folder, release, SHARE, part, **options) for part in ("train", "val")]
    return [dataset[at] for dataset in parts for at in range(len(dataset))]


def collate(samples: Sequence[Any], max_len: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """One batch, as the release's own data loader makes it for EAGLE-3."""
    make = getattr(DATA, "CollateFn", None) or DATA.create_collate_fn
    given: dict[str, Any] = {"max_len": max_len, "hidden_size": HIDDEN_SIZE, "dtype": dtype}
    if not SHIFTS_ITSELF:
        given["preprocess"] = find("speculators.models.eagle3.data.shift_batch")
    accepted = inspect.signature(make).parameters
    batch = make(**{name: value for name, value in given.items() if name in accepted})(list(samples))
    batch.pop("error_records", None)
    return batch


def document_ids(batch: dict[str, Any], max_len: int) -> torch.Tensor:
    """Whose each place of a batch is, as [1, max_len], -1 for none: some releases say it with lengths."""
    if "document_ids" in batch:
        return batch["document_ids"]
    owners = torch.repeat_interleave(torch.arange(len(batch["lengths"])), batch["lengths"])
    return torch.nn.functional.pad(owners, (0, max_len - len(owners)), value=-1).unsqueeze(0)


def matches(sample: Any, row: Row) -> bool:
    """Whether a sample of a dataset is the row, value for value."""
    wanted = as_sample(row, shifted=SHIFTS_ITSELF)
    return sample.keys() == wanted.keys() and all(torch.equal(sample[k].to(v.dtype), v) for k, v in wanted.items())


def draft_model(verifier: Path) -> Any:
    """A tiny EAGLE-3 draft of a verifier, with the verifier's whole vocabulary."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    layer = AutoConfig.from_pretrained(verifier)
    layer.num_hidden_layers = 1
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=layer.vocab_size,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(verifier), architectures=["LlamaForCausalLM"]),
        ),
    )
    vocabulary = {
        "t2d": torch.ones(layer.vocab_size, dtype=torch.bool),
        "d2t": torch.zeros(layer.vocab_size, dtype=torch.long),
    }
    accepted = inspect.signature(Eagle3DraftModel.__init__).parameters
    model = Eagle3DraftModel(config, **{name: value for name, value in vocabulary.items() if name in accepted})
    if hasattr(model, "load_verifier_weights"):  # else its constructor did
        model.load_verifier_weights()
    return model
