"""Rules between [data] and train.task, checked before any process starts.

A conversation is rendered and packed as a whole: one that is split over two sequences loses its beginning, and one that
attends to its neighbours in a sequence has another loss than alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.problem import Fix, Problem, shown_value

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_KEPT_WHOLE: list[Fix] = [{"data.packing": "whole", "data.mask_documents": True}, {"data.packing": "none"}]
_KEYS_OF_TASKS = {
    "messages_key": ("sft",),
    "chosen_key": ("dpo",),
    "rejected_key": ("dpo",),
    "chat_template": ("sft", "dpo"),
    "train_on": ("sft", "dpo"),
}
"""Keys of [data] that only some tasks read."""


def data_rule_problems(job: Job) -> Iterator[Problem]:
    """Yield what of a job's data does not go together."""
    data, is_object = job.data, is_object_source(job.data.source)
    if data.packing != "split" and is_object:
        what = (
            f'data.packing = "{data.packing}" packs text, and the samples of data.source = {data.source!r} are its own'
        )
        yield Problem(what, [{"data.packing": "split"}])
    if data.on_bad_document != "stop" and is_object:
        what = f'data.on_bad_document = "skip" leaves out documents, and data.source = {data.source!r} has samples'
        yield Problem(what, [{"data.on_bad_document": "stop"}])
    # Conversations and pairs need another packing, with which too_long does something.
    if data.packing == "split" and data.too_long != "stop" and job.train.task == "pretrain":
        what = (
            f'data.too_long = "{data.too_long}" does nothing with data.packing = "split", which keeps no document whole'
        )
        yield Problem(what, [{"data.too_long": "stop"}, {"data.packing": "whole"}])
    if job.train.task == "sft":
        yield from _sft_problems(job)
    yield from _unread_problems(job)


def _sft_problems(job: Job) -> Iterator[Problem]:
    data = job.data
    if is_object_source(data.source):
        what = f'train.task = "sft" reads conversations, and data.source = {data.source!r} makes samples of its own'
        yield Problem(what, [{"train.task": "pretrain"}], after=", or data.source to a JSONL or Parquet file")
    elif data.packing == "split":
        yield Problem(
            'data.packing = "split" cuts conversations apart, which train.task = "sft" needs whole', _KEPT_WHOLE
        )
    elif data.packing == "whole" and not data.mask_documents:
        what = (
            'data.packing = "whole" puts several conversations into one sequence, which attend to one another with '
            "data.mask_documents = false"
        )
        yield Problem(what, [{"data.mask_documents": True}, {"data.packing": "none"}])


def _unread_problems(job: Job) -> Iterator[Problem]:
    task = job.train.task
    for number, table in enumerate(job.data.mixture, start=1):
        where = f"data.mixture, table {number} ({table.label})"
        for key in ("messages_key", "chosen_key", "rejected_key"):
            value, tasks = getattr(table, key), _KEYS_OF_TASKS[key]
            if value is not None and task not in tasks:
                what = f'{where}: {key} = {shown_value(value)} does nothing with train.task = "{task}"'
                yield Problem(what, [{"train.task": one} for one in tasks], after=", or leave it out")
    for key, tasks in _KEYS_OF_TASKS.items():
        value, default = getattr(job.data, key), type(job.data).model_fields[key].default
        if value != default and job.train.task not in tasks:
            what = f'data.{key} = {shown_value(value)} does nothing with train.task = "{job.train.task}"'
            yield Problem(what, [*({"train.task": task} for task in tasks), {f"data.{key}": default}])
