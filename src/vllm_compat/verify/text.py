"""A verdict as text."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_compat.verify.selfcheck import SelfCheckResult
from vllm_compat.verify.table import heat, table
from vllm_compat.verify.verdict import Verdict

__all__ = ["as_text"]


def as_text(verdict: Verdict, rest: str) -> str:
    """What was looked at, what was found, and the first problems.

    Args:
        verdict: what to tell.
        rest: where the problems are that are not told, or how to get them.
    """
    return "\n".join(_lines(verdict, rest))


def _lines(verdict: Verdict, rest: str) -> Iterator[str]:
    run, scan = verdict.run, verdict.scan
    layers = " ".join(map(str, run.layer_ids))
    yield f"run         {run.folder}: {run.num_samples} samples, layers {layers}, format {run.format.name}"
    speed = scan.bytes / 1e6 / max(scan.seconds, 1e-9)
    read = f"{scan.good} of {scan.read} files are good: {scan.tokens} tokens, {scan.bytes / 1e9:.3f} GB, "
    yield f"scan        {read}{scan.seconds:.1f} s, {speed:.0f} MB/s"
    if not verdict.scanned:
        yield "            no more was read (--no-scan)"
    if scan.skipped:
        yield f"            {scan.skipped} samples have no file: their states were not finite, or their tokens too many"
    if verdict.input_why_not:
        yield f"input       tokens were not compared with {verdict.input_path}: {verdict.input_why_not}"
    else:
        yield f"input       tokens, loss masks and ids compared with {verdict.input_path}"
    for check in verdict.self_checks:
        yield f"self-check  {_self_check(check)}"
    if verdict.self_check_why_not:
        yield f"self-check  not done: {verdict.self_check_why_not}"
    yield from (f"note        {note}" for note in verdict.notes)
    if verdict.recomputed_why_not:
        yield f"reference   not computed again: {verdict.recomputed_why_not}"
    if verdict.recomputed:
        samples = ", ".join(map(str, verdict.recomputed.samples))
        tokens = sum(verdict.recomputed.lengths)
        yield f"reference   computed again by HF transformers: samples {samples}, {tokens} tokens"
        yield table(verdict.recomputed)
        yield heat(verdict.recomputed)
    yield from _problems(verdict, rest)
    yield _last(verdict)


def _self_check(check: SelfCheckResult) -> str:
    """``"500 of 500"``, and of what."""
    state = str(check.layer_id) if check.norm == "none" else f"{check.norm} norm of layer {check.layer_id}"
    tied = f" ({check.tied} of them within rounding of the largest logit)" if check.tied else ""
    what = f"argmax(lm_head({state})) is the token that vLLM sampled"
    return f"{check.agree} of {check.checked}{tied}: {what}; lm_head is {check.head}"


def _problems(verdict: Verdict, rest: str) -> Iterator[str]:
    if verdict.num_problems:
        yield ""
        yield f"{verdict.num_problems} problems, with {verdict.num_bad_samples} samples:"
        yield from (f"  {problem}" for problem in verdict.first)
        if verdict.num_problems > len(verdict.first):
            yield f"  ... and {verdict.num_problems - len(verdict.first)} more, {rest}"


def _last(verdict: Verdict) -> str:
    done, total = verdict.scan.done, verdict.run.num_samples
    if verdict.num_problems:
        return "WRONG: this run is not right as it is"
    if verdict.exit_code and verdict.complete:
        return "NOT PROVEN: neither the reference nor the self-check could be computed"
    if verdict.complete:
        return f"GOOD: all {total} samples" if verdict.scanned else f"GOOD: the {verdict.scan.read} that were read"
    why = "" if done < total else ", and it is not sealed"
    return f"NOT COMPLETE: {done} of {total} samples are done{why}; what is there is sound, the same command goes on"
