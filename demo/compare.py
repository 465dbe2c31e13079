"""Compare extracted hidden states with an independent reference: HF transformers in float32.

    python demo/compare.py --model DIR --prepared FILE --states OUTPUT_DIR [--samples 4] [--layer-ids 2 15 29 norm]

A layer id ``k`` is the residual stream leaving decoder layer ``k`` (0-based), before the final norm; ``norm`` is the
state after the final norm. Nothing here uses vllm-compat or vLLM.

Errors are each token's own, relative to its state: their root mean square, and their median. The error over all tokens
together would mislead: token 0's state is huge in the middle layers (in SmolLM2-135M one value is 22,574 after plain
text, 24,929 after a chat's opening, where an ordinary token's whole norm is about 150), so that figure is nearly token
0's alone, one draw of rounding noise. A layer is ok when both errors are at most ``ALLOWED`` times what HF's own
bfloat16 run has. The columns "layer before" and "layer after" are the control: the same errors with the neighbours as
the reference, which is what an off-by-one would give.

Exit code: 0 all ok, 5 states that are wrong, missing or of other tokens, 4 an unusable prepared file or model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

LayerId: TypeAlias = int | Literal["embed", "norm"]
States: TypeAlias = dict[LayerId, NDArray[np.float32]]
"""Layer id -> [tokens, hidden_size]; ``"embed"`` is what enters layer 0, its neighbour before."""

ALLOWED = 2.0
EXIT_INPUT, EXIT_INTEGRITY = 4, 5


class StatesError(Exception):
    """Extracted states that are missing, of the wrong shape, or of other tokens than the prepared file's."""


@dataclass(frozen=True)
class Errors:
    """How far states are from a reference.

    Attributes:
        rms: root mean square over the tokens of each token's own relative L2 error, ``|a - b| / |b|``.
        median: the median of the same.
        min_cosine: the least cosine between a token's state and its reference.
    """

    rms: float
    median: float
    min_cosine: float

    def within(self, noise: Errors) -> bool:
        """Whether both errors are at most ``ALLOWED`` times the given ones; False where one is not a number."""
        return self.rms <= ALLOWED * noise.rms and self.median <= ALLOWED * noise.median


@dataclass(frozen=True)
class LayerResult:
    """One line of the table.

    Attributes:
        layer_id: the layer.
        ours: the extracted states against HF float32.
        bf16: HF's own bfloat16 run against HF float32.
        before: the extracted states against HF float32 of the layer before; None where there is none.
        after: the same, the layer after.
        looks_like: the neighbours as which the extracted states would be ok: ``"before"``, ``"after"``, both or none.
    """

    layer_id: LayerId
    ours: Errors
    bf16: Errors
    before: Errors | None
    after: Errors | None
    looks_like: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the extracted states are as near to float32 as bfloat16 can be expected to be."""
        return self.ours.within(self.bf16)

    @property
    def control(self) -> str:
        """What the neighbours say: whether an off-by-one would be seen, or, of wrong states, that it is one."""
        if self.ok:
            return "in the noise" if self.looks_like else "would show"
        return f"is the one {' and '.join(self.looks_like)}" if self.looks_like else "is neither"


def errors(states: NDArray[np.float32], reference: NDArray[np.float32]) -> Errors:
    """Errors of states against a reference, summed in float64.

    Args:
        states: [tokens, hidden_size].
        reference: the same shape, no row all zero.
    """
    a, b = states.astype(np.float64), reference.astype(np.float64)
    apart, size_a, size_b = (np.linalg.norm(x, axis=1) for x in (a - b, a, b))
    with np.errstate(divide="ignore", invalid="ignore"):  # a row of zeros has no cosine; NaN says so in the table
        cosine = (a * b).sum(axis=1) / (size_a * size_b)
    return Errors(
        rms=float(np.sqrt(np.mean((apart / size_b) ** 2))),
        median=float(np.median(apart / size_b)),
        min_cosine=float(cosine.min()),
    )


def compare_layers(
    layer_ids: Sequence[LayerId], ours: States, float32: States, bfloat16: States, order: Sequence[LayerId]
) -> list[LayerResult]:
    """One result for each layer.

    Args:
        layer_ids: the layers to compare, all in ``ours``.
        ours: the extracted states, the tokens of all samples one after another.
        float32: HF's float32 states of the same tokens, for every id in ``order``.
        bfloat16: HF's bfloat16 states, likewise.
        order: every layer id from ``"embed"`` to ``"norm"``, from which the neighbours come.
    """
    results = []
    for layer_id in layer_ids:
        at = order.index(layer_id)
        neighbours = {"before": order[at - 1 : at], "after": order[at + 1 : at + 2]}
        near = {name: errors(ours[layer_id], float32[k]) for name, ids in neighbours.items() for k in ids}
        noise = {name: errors(bfloat16[k], float32[k]) for name, ids in neighbours.items() for k in ids}
        results.append(
            LayerResult(
                layer_id,
                ours=errors(ours[layer_id], float32[layer_id]),
                bf16=errors(bfloat16[layer_id], float32[layer_id]),
                before=near.get("before"),
                after=near.get("after"),
                looks_like=tuple(name for name in near if near[name].within(noise[name])),
            )
        )
    return results


def table(results: Sequence[LayerResult]) -> str:
    """The results as text; a pair of errors reads "root mean square / median of the tokens"."""
    head = ("layer", "ours", "HF bfloat16", "min cosine", "layer before", "layer after", "off by one", "verdict")
    rows: list[tuple[str, ...]] = [head]
    for r in results:
        pairs = [_pair(e) for e in (r.ours, r.bf16, r.before, r.after)]
        verdict = "ok" if r.ok else "WRONG"
        rows.append((str(r.layer_id), *pairs[:2], f"{r.ours.min_cosine:.6f}", *pairs[2:], r.control, verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def _pair(e: Errors | None) -> str:
    return f"{e.rms:.2e} / {e.median:.2e}" if e else "-"


def spread(rows: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the rows, evenly spread, the first and the last included when ``count`` > 1."""
    if len(rows) <= count:
        return list(rows)
    return [rows[i * (len(rows) - 1) // max(count - 1, 1)] for i in range(count)]


def parse_layer_id(text: str) -> LayerId:
    """A layer id of the command line: ``"norm"`` or an integer from 0."""
    if text == "norm":
        return "norm"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither an integer from 0 nor 'norm'")
    return int(text)


def read_states(path: Path, input_ids: Sequence[int]) -> States:
    """The extracted states of one sample.

    Args:
        path: its safetensors file.
        input_ids: its tokens in the prepared file.

    Raises:
        StatesError: no metadata, tensors that do not fit together, other tokens, or a value that is not finite.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no dict
    except SafetensorError as error:
        raise StatesError(f"{path}: {error}") from error
    missing = sorted({"hidden_states", "token_ids"} - set(tensors))
    if missing or "layer_ids" not in metadata:
        raise StatesError(f"{path}: no {', '.join(missing) or 'layer_ids in its metadata'}")
    hidden_states, token_ids = tensors["hidden_states"], tensors["token_ids"].tolist()
    layer_ids: list[LayerId] = json.loads(metadata["layer_ids"])
    if token_ids != list(input_ids):
        raise StatesError(f"{path}: its token_ids are not the input_ids of its row in the prepared file")
    if hidden_states.ndim != 3 or tuple(hidden_states.shape[:2]) != (len(token_ids), len(layer_ids)):
        wanted = f"[{len(token_ids)}, {len(layer_ids)}, hidden_size]"
        raise StatesError(f"{path}: hidden_states has the shape {list(hidden_states.shape)}, wanted {wanted}")
    values = hidden_states.float().numpy()
    if not np.isfinite(values).all():
        raise StatesError(f"{path}: hidden_states has values that are not finite")
    return {layer_id: values[:, i] for i, layer_id in enumerate(layer_ids)}


def reference_states(model_dir: Path, dtype: str, samples: Sequence[Sequence[int]]) -> States:
    """The states of every layer, from HF transformers with eager attention.

    Hooks on the decoder layers are used rather than ``output_hidden_states``, whose last entry has been through the
    final norm.

    Args:
        model_dir: the HF folder of a model with ``layers``, ``norm`` and ``embed_tokens``.
        dtype: ``"float32"`` or ``"bfloat16"``: weights and computation.
        samples: the token ids of each sample; each is forwarded alone.

    Returns:
        ``"embed"``, every layer and ``"norm"``, in the model's order, the tokens of all samples one after another.
    """
    import torch
    import transformers
    from packaging.version import Version

    # Loading and then casting would cast RoPE's frequencies too, which a bfloat16 model keeps in float32.
    keyword = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    load: dict[str, Any] = {keyword: getattr(torch, dtype), "attn_implementation": "eager"}
    model = transformers.AutoModel.from_pretrained(model_dir, **load).eval()
    seen: dict[LayerId, list[Any]] = {}

    def keep(layer_id: LayerId, module: Any) -> None:
        rows = seen.setdefault(layer_id, [])

        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output  # a tuple in older releases
            rows.append(state[0].float().numpy())

        module.register_forward_hook(hook)

    keep("embed", model.embed_tokens)
    for k, layer in enumerate(model.layers):
        keep(k, layer)
    keep("norm", model.norm)
    with torch.inference_mode():
        for input_ids in samples:
            model(torch.tensor([list(input_ids)]), use_cache=False)
    return {layer_id: np.concatenate(rows) for layer_id, rows in seen.items()}


def compare(
    model_dir: Path, prepared: Path, states_dir: Path, samples: int, layer_ids: Sequence[LayerId] | None
) -> list[LayerResult]:
    """Read, compute and compare; the parameters are those of the command line.

    Raises:
        StatesError: see ``read_states``; also no file at all, or a layer that the files or the model have not.
    """
    with prepared.open(encoding="utf-8") as file:
        inputs: list[list[int]] = [json.loads(line)["input_ids"] for line in file]
    paths = [states_dir / f"hs_{row}.safetensors" for row in range(len(inputs))]
    have = [row for row, path in enumerate(paths) if path.is_file()]
    if not have:
        raise StatesError(f"{states_dir}: no hs_*.safetensors of the {len(inputs)} rows in {prepared}")
    rows = spread(have, samples)
    tokens = sum(len(inputs[row]) for row in rows)
    print(f"{len(have)} of {len(inputs)} rows have states; compared: rows {', '.join(map(str, rows))}, {tokens} tokens")

    read = [read_states(paths[row], inputs[row]) for row in rows]
    wanted = list(layer_ids or read[0])
    for row, states in zip(rows, read, strict=True):
        if absent := [layer_id for layer_id in wanted if layer_id not in states]:
            raise StatesError(f"{paths[row]}: no layer {absent[0]}; it has {', '.join(map(str, states))}")
    ours: States = {layer_id: np.concatenate([states[layer_id] for states in read]) for layer_id in wanted}

    float32 = reference_states(model_dir, "float32", [inputs[row] for row in rows])
    bfloat16 = reference_states(model_dir, "bfloat16", [inputs[row] for row in rows])
    for layer_id in wanted:
        if layer_id not in float32 or ours[layer_id].shape != float32[layer_id].shape:
            raise StatesError(f"layer {layer_id}: the model has no such layer, or another hidden_size")
    return compare_layers(wanted, ours, float32, bfloat16, list(float32))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code, see the module."""
    parser = argparse.ArgumentParser(description="Compare extracted hidden states with HF transformers in float32.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="HF folder of the model")
    parser.add_argument("--prepared", type=Path, required=True, metavar="FILE", help="the prepared JSONL file")
    parser.add_argument("--states", type=Path, required=True, metavar="DIR", help="folder with hs_*.safetensors")
    parser.add_argument("--samples", type=int, default=4, help="samples to compare, spread over the file (default: 4)")
    parser.add_argument(
        "--layer-ids", type=parse_layer_id, nargs="+", metavar="ID", help="layers to compare (default: all extracted)"
    )
    args = parser.parse_args(argv)
    if args.samples < 1:
        parser.error("--samples: at least 1 is needed")
    try:
        results = compare(args.model, args.prepared, args.states, args.samples, args.layer_ids)
    except StatesError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INTEGRITY
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INPUT
    print(table(results))
    wrong = [str(r.layer_id) for r in results if not r.ok]
    print(f"WRONG: layer {', '.join(wrong)}" if wrong else f"all {len(results)} layers ok")
    return EXIT_INTEGRITY if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
