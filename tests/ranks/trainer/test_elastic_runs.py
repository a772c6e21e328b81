"""Whatever ranks, layouts, microbatches, workers and ends the attempts of a run have: it is the run on one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from data_kinds import KINDS
from elastic_run import STEPS, Attempt, ElasticRun, draw_attempt
from meshwright.errors import ExitCode

NUM_RUNS = 40
QUICK = (8, 13)
"""Runs of few processes: SIGTERM with workers, and a kill, too, of a stream."""
RUNS = [pytest.param(number, marks=[] if number in QUICK else pytest.mark.long) for number in range(NUM_RUNS)]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ElasticRun]:
    """Return a function: the run on data of a kind that one rank did without workers and without a stop."""

    @cache
    def done(kind: str) -> ElasticRun:
        run = ElasticRun(tmp_path_factory.mktemp("one") / "run", kind)
        assert run.train(Attempt({}, interval=STEPS)) is ExitCode.DONE
        return run

    return done


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", RUNS)
def test_a_run_in_attempts_is_the_run_on_one_rank(
    number: int, tmp_path_factory: pytest.TempPathFactory, on_one_rank: Callable[[str], ElasticRun]
) -> None:
    draw, kind = random.Random(number), KINDS[number % len(KINDS)]
    run = ElasticRun(tmp_path_factory.mktemp("run") / "elastic", kind)
    attempts = [draw_attempt(draw, kind) for _ in range(draw.randint(1, 3))]
    for attempt in attempts:
        code = run.train(attempt)
        # For the report of a run that fails.
        print(f"{kind}: {attempt}: {code.name}, {run.was_hit = }, {run.run.checkpoint_steps() = }")
        assert code in (ExitCode.DONE, ExitCode.RETRY)
        if code is ExitCode.DONE:
            break
    else:
        assert run.train(Attempt({})) is ExitCode.DONE
    run.require_samples_of(on_one_rank(kind))
    assert run.losses == pytest.approx(on_one_rank(kind).losses, rel=1e-4)
