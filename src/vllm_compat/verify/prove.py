"""A verification: the scan and the self-check beside it, then the samples that are computed again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from vllm_compat.extract.progress import ProgressFactory
from vllm_compat.extract.revision import find_revision
from vllm_compat.verify.again import choose_samples, compute_again
from vllm_compat.verify.checkpoint import CheckpointError, find_folder
from vllm_compat.verify.compare import Recomputed
from vllm_compat.verify.config import VerifyConfig
from vllm_compat.verify.ends import find_ends
from vllm_compat.verify.lines import Lines
from vllm_compat.verify.picture import draw, require_matplotlib
from vllm_compat.verify.problems import JsonReport, Problem, Problems
from vllm_compat.verify.reference import NoReferenceError
from vllm_compat.verify.rows import open_rows
from vllm_compat.verify.run import RunFacts, open_facts
from vllm_compat.verify.sample import Checked
from vllm_compat.verify.scan import scan
from vllm_compat.verify.selfcheck import SelfCheck
from vllm_compat.verify.verdict import Verdict

__all__ = ["verify"]

_RECOMPUTED = 4
# Of vLLM's SamplingParams; with any other the token that is taken need not be the one of the largest logit.
_LEAVE_THE_LIKELIEST = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "logprobs"}
)


def verify(
    config: VerifyConfig, *, report: JsonReport | None = None, progress: ProgressFactory | None = None
) -> Verdict:
    """Look for everything that is wrong with a run; nothing of it is changed.

    Args:
        config: what to do.
        report: gets every problem; left open.
        progress: told of every sample that is read.

    Raises:
        UsageError: there is no run in the folder, or a package that its format or the picture takes is missing.
        InputError: the input that was given cannot be used, or the run's changes meanwhile.
        JournalError: ``run.json`` cannot be understood, or a journal changes meanwhile.
        StorageError: the folder cannot be read, or a report not be written.
    """
    if config.picture:
        require_matplotlib()
    run = open_facts(config.folder)
    problems = Problems(run.num_samples, report)
    rows = open_rows(run, config.prepared_data, problems, trust_remote_code=config.trust_remote_code)
    lines = Lines(run, problems)
    chosen = choose_samples(lines, config.samples or _RECOMPUTED, config.seed) if config.chooses else []
    folder, checks, why_not = _self_checks(run, config, problems)
    checkable = None if config.samples is None else frozenset(chosen)
    damaged: set[int] = set()

    def seen(checked: Checked) -> None:
        if checked.what and checked.entry.index in chosen:
            damaged.add(checked.entry.index)
        if checkable is None or checked.entry.index in checkable:
            for check in checks:
                check.add(checked)

    total = lines.num_done if config.scan else len(chosen)
    with contextlib.closing(progress(total)) if progress else contextlib.nullcontext() as bar:
        found = scan(
            *(run, lines, rows, problems),
            jobs=config.threads,
            only=None if config.scan else frozenset(chosen),
            ends=tuple(check.end.place for check in checks),
            seen=seen,
            progress=bar,
        )
    results = [check.finish() for check in checks]
    if unfit := [check.why_not for check in checks if check.why_not]:
        results, why_not = [], unfit[0]
    recomputed, why_not_again = None, ""
    if config.model is not None:
        try:
            sound = [index for index in chosen if index not in damaged]
            recomputed = compute_again(run, lines, sound, config, str(folder or config.model))
            _judge(recomputed, problems)
        except NoReferenceError as error:
            why_not_again = str(error)
    if recomputed and config.picture:
        draw(recomputed, config.picture, f"{run.model}: {config.folder}")
    return Verdict(
        run=run,
        scan=found,
        scanned=config.scan,
        complete=run.complete and found.done == run.num_samples,
        partial=config.partial,
        input_path=str(rows.path),
        input_why_not=rows.why_not,
        self_checks=tuple(results),
        self_check_why_not=why_not,
        recomputed=recomputed,
        recomputed_why_not=why_not_again,
        notes=tuple(_notes(run, config, folder)),
        num_problems=problems.count,
        num_bad_samples=problems.num_samples,
        first=problems.first,
    )


def _self_checks(run: RunFacts, config: VerifyConfig, problems: Problems) -> tuple[Path | None, list[SelfCheck], str]:
    """The model's folder where it is on this machine, a self-check for each layer that allows one, or why none."""
    folder = None
    if run.sampling.get("temperature"):
        why = f"the answers were sampled at temperature {run.sampling['temperature']}, not the likeliest tokens taken"
        return folder, [], why
    if moved := sorted(run.sampling.keys() - _LEAVE_THE_LIKELIEST):
        return (
            folder,
            [],
            f"the answers were sampled with {', '.join(moved)}, which can make another token the likeliest",
        )
    try:
        folder = find_folder(config.model or run.model, run.revision)
        head, ends = find_ends(run, folder, config.device)
    except CheckpointError as error:
        return folder, [], str(error)
    return folder, [SelfCheck(head, end, run.dtype, problems, config.device) for end in ends], ""


def _notes(run: RunFacts, config: VerifyConfig, folder: Path | None) -> Iterator[str]:
    """What a reader of the verdict should know."""
    if run.complete and run.sidecars is None:
        yield "the run is of an earlier release, which kept no checksums of the files beside the samples: not compared"
    revision = find_revision(str(folder), {}) if folder else None
    if None not in (revision, run.revision) and revision != run.revision:
        yield f"{folder} is not the model of the run: its revision is {revision}, the run's was {run.revision}"
    options = run.record.identity.get("engine_options")
    if options and config.model is not None:
        yield f"the engine had options that the reference does not have: {options}"


def _judge(found: Recomputed, problems: Problems) -> None:
    """What is out of bounds is a problem."""
    for result in found.layers:
        if not result.ok:
            what = (
                f"computed again: {found.diagnose(result)} (typical error {result.ours.typical:.2e}, bound "
                f"{result.bound:.2e})"
            )
            problems.add(Problem(what))
