"""What preference optimisation (train.task = "dpo") needs and does not go with, checked before any process starts.

A pair is in one row, chosen and rejected as two documents, so that no rank, microbatch or row holds half of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.spec.job.dpo_section import DpoSection
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import Problem, shown_value

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_Rules = Iterator[tuple[str, Any, bool, Any, str]]
"""Of (key, its value, whether that is ruled out, a value that is not, why)."""


def dpo_problems(job: Job) -> Iterator[Problem]:
    """Yield what of a job, whatever its layout is, preference optimisation does not go with."""
    if job.train.task != "dpo":
        yield from _unused(job.dpo)
        return
    if is_object_source(job.data.source):
        what = f'train.task = "dpo" reads pairs of answers, and data.source = {job.data.source!r} makes its own samples'
        yield Problem(what, [{"train.task": "pretrain"}], after=", or data.source to a JSONL or Parquet file")
    elif job.data.packing == "split" or not job.data.mask_documents:
        what = (
            'train.task = "dpo" puts both answers of a pair into one sequence, neither of which may see the other, and '
            f'data.packing = "{job.data.packing}" with data.mask_documents = {shown_value(job.data.mask_documents)}'
        )
        how = "none" if job.data.packing == "none" else "whole"
        yield Problem(f"{what} does not keep them whole and apart", [_kept_apart(how)])
    yield from _problems(_job_rules(job))


def dpo_layout_problems(job: Job, layout: Layout) -> Iterator[Problem]:
    """Yield what of a layout preference optimisation does not go with."""
    if job.train.task == "dpo":
        yield from _problems(_layout_rules(layout))


def _kept_apart(packing: str) -> dict[str, Any]:
    return {"data.packing": packing, "data.mask_documents": True}


def _unused(section: DpoSection) -> Iterator[Problem]:
    for key, default in DpoSection().to_dict().items():
        value = section.to_dict()[key]
        if value != default:
            what = f'dpo.{key} = {shown_value(value)} does nothing unless train.task = "dpo"'
            yield Problem(what, [{"train.task": "dpo"}, {f"dpo.{key}": default}])


def _problems(rules: _Rules) -> Iterator[Problem]:
    for key, value, is_ruled_out, default, why in rules:
        if is_ruled_out:
            what = f'{key} = {shown_value(value)}: {why}, so train.task = "dpo" refuses it'
            yield Problem(what, [{key: default}])


def _job_rules(job: Job) -> _Rules:
    data, train, dpo = job.data, job.train, job.dpo
    is_unread = dpo.loss in ("hinge", "ipo") and dpo.label_smoothing > 0
    smoothing = f'dpo.loss = "{dpo.loss}" has no share of wrong labels'
    yield "dpo.label_smoothing", dpo.label_smoothing, is_unread, 0.0, smoothing
    cut = "an answer that is cut off is another answer than the one that was preferred"
    yield "data.too_long", data.too_long, data.too_long == "cut", "skip", cut
    prompt = "the prompt is part of no answer"
    yield "data.train_on", data.train_on, data.train_on == "all", "assistant", prompt
    float8 = "differences of log-probabilities in float8 have not been tried"
    yield "precision.float8", job.precision.float8, job.precision.float8 != "none", "none", float8
    exact = "its sums have not been shown to be exact"
    yield "train.exact_elastic", train.exact_elastic, train.exact_elastic, False, exact
    independent = job.replicas.independent
    replicas = "each replica would need the reference's log-probabilities, which has not been proven"
    yield "replicas.independent", independent, independent, False, replicas


def _layout_rules(layout: Layout) -> _Rules:
    captured = "CUDA graphs have not been tried with a loss of pairs"
    yield "layout.cuda_graphs", layout.cuda_graphs, layout.cuda_graphs, False, captured
    graph = "a model that is one graph has not been tried with a loss of pairs"
    yield "layout.compile", layout.compile, layout.compile == "model", True, graph
