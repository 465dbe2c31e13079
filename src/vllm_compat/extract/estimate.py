"""What a run will take, from its plan: said before anything is loaded, and refused where it surely does not fit.

Every figure is computed, or unknown with the reason.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from vllm_compat.errors import UsageError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.done import Done, read_done
from vllm_compat.extract.files import storage
from vllm_compat.extract.kvcache import engine_element_bytes, kv_bytes_per_token
from vllm_compat.extract.model import read_model_facts
from vllm_compat.extract.plan import Plan, make_plan

__all__ = ["Estimate", "Figure", "estimate", "estimate_of"]

_GB = 1e9
_MINUTES = (1 / 60, ".1f", " minutes")
_UNKNOWN_DTYPE = "the size of dtype {!r} is not known here"
_IDS = 8  # bytes of a token's id, and as many of its loss mask, in every format
_HEADER = 1024  # bytes of a file's header and metadata, about
_TIGHT = 0.9  # share of what is free beyond which a warning is due
_COPIES = 3  # of a sample's states in a thread that writes: in the dtype to save, side by side, and as a file


@dataclass(frozen=True, slots=True)
class Figure:
    """A number before it is so.

    Attributes:
        value: None when it is unknown.
        how: what it is computed from, or why it is unknown.
    """

    value: float | None
    how: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will take.

    Attributes:
        samples: of the input.
        tokens: of the input, after the cut.
        truncated: samples that lose tokens by it.
        longest: tokens of the longest sample after it.
        owed_samples: samples that are not done, of all shards.
        owed_tokens: tokens of these; more by those of samples that were skipped. With answers about the most.
        copied_samples: of the owed ones those whose tokens another one has; they are made from its file.
        copied_tokens: tokens of these, which the model does not see.
        left_out: samples of the input with more tokens than may be, which are left out.
        state_bytes_per_token: of states on disk.
        disk_bytes: what is still to be written, by all shards.
        free_bytes: on the output folder's file system.
        free_files: files that may still be made there; there is one for each sample.
        kv_bytes_per_token: of KV cache, on each GPU.
        kv_bytes: of KV cache on each GPU, for a full batch of samples as long as the longest may be.
        host_bytes: the most of the host's memory that states take at once, in this process.
        hours: of this process's share, without the load.
        samples_per_second: of this process.
        disk_bytes_per_second: that this process writes.
        warnings: what may go wrong.
        refusal: what surely will; empty when nothing does.
    """

    samples: int
    tokens: int
    truncated: int
    longest: int
    owed_samples: int
    owed_tokens: int
    copied_samples: int
    copied_tokens: int
    left_out: int
    state_bytes_per_token: Figure
    disk_bytes: Figure
    free_bytes: Figure
    free_files: Figure
    kv_bytes_per_token: Figure
    kv_bytes: Figure
    host_bytes: Figure
    hours: Figure
    samples_per_second: Figure
    disk_bytes_per_second: Figure
    warnings: tuple[str, ...]
    refusal: str

    def as_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return dataclasses.asdict(self)

    def require_room(self) -> None:
        """Refuse what surely does not fit.

        Raises:
            UsageError: with the figures.
        """
        if self.refusal:
            raise UsageError(self.refusal)

    def __str__(self) -> str:
        lines = [
            f"samples: {self.samples:,}, {self.tokens:,} tokens, {self.longest:,} at most; {self.truncated:,} are cut"
            + (f", {self.left_out:,} left out" if self.left_out else ""),
            f"to be done: {self.owed_samples:,} samples, {self.owed_tokens:,} tokens{self._copied()}",
            f"states on disk: {_shown(self.state_bytes_per_token, 1, ',.0f', ' bytes a token')}",
            f"files: {_shown(self.disk_bytes, _GB, ',.3f', ' GB')}",
            f"free: {_shown(self.free_bytes, _GB, ',.3f', ' GB')}; {_shown(self.free_files, 1, ',.0f', ' more files')}",
            f"KV cache: {_shown(self.kv_bytes_per_token, 1, ',.0f', ' bytes a token on each GPU')}",
            f"KV cache of a full batch: {_shown(self.kv_bytes, _GB, ',.3f', ' GB on each GPU')}",
            f"host memory for states: {_shown(self.host_bytes, _GB, ',.3f', ' GB at most')}",
            f"time: {_shown(self.hours, *((1, ',.1f', ' hours') if (self.hours.value or 0) >= 1 else _MINUTES))}",
        ]
        if self.hours.value is not None:
            lines.append(
                f"rates: {_shown(self.samples_per_second, 1, ',.2f', ' samples/s')}; to disk "
                f"{_shown(self.disk_bytes_per_second, 1e6, ',.1f', ' MB/s')}"
            )
        lines += [f"warning: {text}" for text in self.warnings]
        if self.refusal:
            lines.append(f"refused: {self.refusal}")
        return "\n".join(lines)

    def _copied(self) -> str:
        if not self.copied_samples:
            return ""
        return (
            f"; of these {self.copied_samples:,} samples, {self.copied_tokens:,} tokens are copies of others, which "
            f"the model does not see: {self.owed_tokens - self.copied_tokens:,} tokens to be computed"
        )


def estimate_of(config: ExtractConfig, tokens_per_second: float | None = None) -> Estimate:
    """The estimate of a run that is not begun; an output folder is made, and nothing is written to it.

    Raises:
        VllmCompatError: whatever speaks against the run.
    """
    plan = make_plan(config)
    done, _ = read_done(plan.output_dir, plan.input.num_samples)
    return estimate(plan, config, done, tokens_per_second)


def estimate(
    plan: Plan,
    config: ExtractConfig,
    done: Done,
    tokens_per_second: float | None = None,
    *,
    division: int | None = None,
) -> Estimate:
    """What is still to be done of a run, and what that takes.

    Args:
        plan: of the run.
        config: of the run.
        done: what is done, by whatever process.
        tokens_per_second: of this process; None when not known.
        division: into how many shards the samples are divided, where it is not by ``config.shard``.

    Raises:
        UsageError: a rate that cannot be one.
    """
    if tokens_per_second is not None and not tokens_per_second > 0:
        raise UsageError(f"tokens per second must be above 0, found {tokens_per_second}")
    found = plan.input
    samples, tokens = found.num_samples - len(done), found.num_tokens - done.tokens
    least = max(0, tokens - done.num_skipped * found.longest)
    if config.generate:  # what is done has answers, too, and nobody knows how long the others will be
        tokens = round(samples * (found.num_tokens / found.num_samples + config.generate))
        least = 0
    states = _state_bytes_per_token(plan, config)
    disk = _disk_bytes(states, samples, tokens, plan)
    free, files = _free(plan)
    kv = Figure(*kv_bytes_per_token(config))
    room = config.batch_size * plan.max_model_len
    copied_samples, copied_tokens = _copied(plan, config, done, division or config.shard[1])
    computed = max(0, tokens - copied_tokens)
    hours, rate, to_disk = _rates(config, done, samples, computed, disk, tokens_per_second)
    warnings, refusal = _judge(plan, samples, least, states, disk, free, files)
    return Estimate(
        samples=found.num_samples,
        tokens=found.num_tokens,
        truncated=found.num_truncated,
        longest=found.longest,
        owed_samples=samples,
        owed_tokens=tokens,
        copied_samples=copied_samples,
        copied_tokens=copied_tokens,
        left_out=found.num_left_out,
        state_bytes_per_token=states,
        disk_bytes=disk,
        free_bytes=free,
        free_files=files,
        kv_bytes_per_token=kv,
        kv_bytes=_times(kv, room, f"{config.batch_size} samples x {plan.max_model_len} tokens"),
        host_bytes=_host_bytes(plan, config, states),
        hours=hours,
        samples_per_second=rate,
        disk_bytes_per_second=to_disk,
        warnings=warnings,
        refusal=refusal,
    )


def _copied(plan: Plan, config: ExtractConfig, done: Done, division: int) -> tuple[int, int]:
    """How many samples are owed whose tokens an earlier one of their shard has, and the tokens of all of these."""
    samples = tokens = 0
    for count, members in plan.input.duplicates.groups() if plan.input.duplicates else ():
        firsts: dict[int, int] = {}
        owed = sum(firsts.setdefault(index % division, index) != index and done.owes(index) for index in members)
        samples, tokens = samples + owed, tokens + owed * (count + config.generate)
    return samples, tokens


def _state_bytes_per_token(plan: Plan, config: ExtractConfig) -> Figure:
    facts = read_model_facts(config.model, config.engine_options)
    layers, width = len(plan.layer_ids), facts.hidden_size
    if width is None:
        return Figure(None, facts.why_unknown or "config.json has no hidden_size")
    if config.format == "speculators-fp8":
        return Figure(layers * (width + 4), f"{layers} layers x ({width} x 1 byte + 4 of scale)")
    element = {"bfloat16": 2, "float32": 4}.get(config.save_dtype) or engine_element_bytes(config)
    if element is None:
        return Figure(None, _UNKNOWN_DTYPE.format(config.dtype))
    return Figure(layers * width * element, f"{layers} layers x {width} x {element} bytes")


def _disk_bytes(states: Figure, samples: int, tokens: int, plan: Plan) -> Figure:
    if states.value is None:
        return states
    block = _file_system(plan).f_frsize
    size = tokens * (states.value + 2 * _IDS) + samples * (_HEADER + block // 2)
    return Figure(
        size,
        f"about: {tokens:,} tokens x ({states.value:,.0f} + {2 * _IDS} of ids and mask) + {samples:,} files x "
        f"({_HEADER:,} of header + half a block)",
    )


def _free(plan: Plan) -> tuple[Figure, Figure]:
    found = _file_system(plan)
    told = "as the file system says; a quota may leave less"
    space = Figure(found.f_bavail * found.f_frsize, told) if found.f_blocks else Figure(None, "it is not told")
    files = Figure(found.f_favail, told) if found.f_files else Figure(None, "this file system has no limit of them")
    return space, files


def _file_system(plan: Plan) -> os.statvfs_result:
    with storage(plan.output_dir, "asked for its room"):
        return os.statvfs(plan.output_dir)


def _host_bytes(plan: Plan, config: ExtractConfig, states: Figure) -> Figure:
    """Rows that are captured until their samples end, what waits for the writers, and what these make of it."""
    width, element = read_model_facts(config.model, config.engine_options).hidden_size, engine_element_bytes(config)
    if states.value is None or width is None or element is None:
        return Figure(
            None, states.how if states.value is None else f"the size of dtype {config.dtype!r} is unknown here"
        )
    longest = min(plan.input.longest + config.generate, plan.max_model_len)
    captured = longest * len(plan.layer_ids) * width * element
    size = (
        2 * config.batch_size * captured
        + max(config.max_pending_bytes, captured)
        + config.writers * _COPIES * longest * states.value
    )
    return Figure(
        size,
        f"2 x {config.batch_size} samples of {longest:,} tokens being captured or handed over, "
        f"{config.max_pending_bytes / 2**30:g} GiB pending, {config.writers} writers; beside the model's own",
    )


def _rates(
    config: ExtractConfig, done: Done, samples: int, tokens: int, disk: Figure, tokens_per_second: float | None
) -> tuple[Figure, Figure, Figure]:
    """Hours, samples a second, and bytes a second to disk, of this process."""
    if tokens_per_second is None:
        unknown = Figure(None, "tokens per second depend on model, GPUs and prompts; give --tokens-per-second")
        return unknown, unknown, unknown
    how = f"at {tokens_per_second:,.0f} tokens/s, which you gave"
    share = done.owed(config.shard) / max(samples, 1)
    if share < 1:
        how += f"; {share:.1%} of what is owed is this shard's, by samples"
    hours = Figure(tokens * share / tokens_per_second / 3600, how)
    rate = Figure(tokens_per_second * samples / max(tokens, 1), how)
    to_disk = disk if disk.value is None else Figure(tokens_per_second * disk.value / max(tokens, 1), how)
    return hours, rate, to_disk


def _judge(
    plan: Plan, samples: int, least: int, states: Figure, disk: Figure, free: Figure, files: Figure
) -> tuple[tuple[str, ...], str]:
    """What may go wrong, and what surely will."""
    warnings: list[str] = []
    refusals: list[str] = []
    folder = plan.output_dir
    if disk.value is not None and states.value is not None and free.value is not None:
        surely = least * (states.value + _IDS)
        if surely > free.value:
            refusals.append(
                f"{folder} has {free.value / _GB:,.3f} GB free, and the states that are still to be written take "
                f"{surely / _GB:,.3f} GB. Make room, or take another folder, fewer samples, fewer layers or a narrower "
                "--save-dtype"
            )
        elif disk.value > _TIGHT * free.value:
            warnings.append(
                f"{folder} has {free.value / _GB:,.3f} GB free, and about {disk.value / _GB:,.3f} GB will be written"
            )
    if files.value is not None:
        if samples > files.value:
            refusals.append(
                f"the file system of {folder} takes {files.value:,.0f} more files, and {samples:,} samples want one "
                "each. Take another file system"
            )
        elif samples > _TIGHT * files.value:
            warnings.append(
                f"the file system of {folder} takes {files.value:,.0f} more files; {samples:,} will be made"
            )
    return tuple(warnings), ". ".join(refusals)


def _times(figure: Figure, factor: int, how: str) -> Figure:
    return figure if figure.value is None else Figure(figure.value * factor, how)


def _shown(figure: Figure, unit: float, form: str, name: str) -> str:
    if figure.value is None:
        return f"unknown: {figure.how}"
    return f"{format(figure.value / unit, form)}{name} ({figure.how})"
