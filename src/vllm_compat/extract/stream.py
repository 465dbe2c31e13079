"""The same job without files: samples as they finish, for whoever consumes them at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

from vllm_compat import engine as engines
from vllm_compat.engine import Engine
from vllm_compat.errors import NonFiniteError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.inputs import read_samples
from vllm_compat.extract.plan import check_engine, make_job
from vllm_compat.extract.prefixes import neighbours
from vllm_compat.extract.run import captured, maker_of, options_of
from vllm_compat.formats import SampleData

__all__ = ["stream"]

logger = logging.getLogger(__name__)


def stream(config: ExtractConfig, engine: Engine | None = None) -> Generator[SampleData, None, None]:
    """Yield every sample with its states as it finishes, checked as those are that are written.

    Args:
        config: what to do. ``output_dir``, ``format`` and what else concerns files is not used, nor is there a
            rehearsal; of ``shard`` the samples of this process are yielded.
        engine: an engine of the caller's that captures the same layers, left open; else one is opened, and closed when
            the generator ends or is closed.

    The order is that in which they finish; ``index`` says which sample it is. The model does nothing while the caller
    works: at most ``3 * batch_size`` samples are ahead of it, under way or computed. Their states
    are on the CPU, in ``save_dtype``, [tokens, layers, hidden_size].

    Raises:
        UsageError, InputError: something cannot be done as asked; before the model is loaded.
        CaptureError: states that are missing, not the sample's, or not finite.
        VllmCompatError: what ``open_engine`` and the engine raise.
    """
    job = make_job(config, engine)
    shard, shards = config.shard
    with contextlib.ExitStack() as stack:
        if engine is None:
            options = config.open_engine_options(job.max_model_len)
            engine = stack.enter_context(engines.open_engine(config.model, layer_ids=job.layer_ids, **options))
        check_engine(job, engine)
        maker = maker_of(job, config, engine)
        samples = (s for s in read_samples(job.input, lambda index: index % shards == shard) if not s.overlong)
        ordered = neighbours(samples) if config.share_prefixes else samples
        running = captured(engine, ordered, 2 * config.batch_size, options_of(job, config, engine))
        for sample, states in stack.enter_context(contextlib.closing(running)):
            try:
                data = maker.make(sample, states)
            except NonFiniteError as error:
                if config.on_nonfinite == "fail":
                    raise
                logger.warning("left out: %s", error)
                continue
            yield data
