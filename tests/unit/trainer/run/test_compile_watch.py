"""What the first step's line says of the compiler: what came from a cache, and what was expected where not all did."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.log import logger
from meshwright.parallelism.torch_private.torch_compile_count import CompileCount
from meshwright.spec.job.job import Job
from meshwright.trainer.run import compile_watch
from meshwright.trainer.run.compile_watch import CompileWatch


@pytest.mark.parametrize(
    ("num_cached", "of_cache", "is_predicted"),
    [
        (0, "", True),
        (1, "(1 of 10 passes from a cache; predicted", True),
        (10, "(10 of 10 passes from a cache)", False),
    ],
)
def test_one_hit_does_not_mark_a_run_as_cached(
    num_cached: int, of_cache: str, is_predicted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(compile_watch, "compile_count", lambda: CompileCount(5, 77.0, num_cached, 10))
    monkeypatch.setattr(logger, "info", lambda text, *args: said.append(text % args))
    CompileWatch().after_step(training(), 1)
    (line,) = said
    assert of_cache in line
    assert ("from a cache" in line) == bool(num_cached)
    assert ("predicted from an empty cache: " in line) == is_predicted


def training() -> Any:
    job = Job.from_dict({"model": {"source": "llama-1m"}, "layout": {"compile": True}})
    ranks = SimpleNamespace(device=SimpleNamespace(type="cpu"), num_ranks=1)
    return SimpleNamespace(layout=job.layout.resolve(1), job=job, ranks=ranks)
