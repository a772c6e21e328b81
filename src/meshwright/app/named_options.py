"""What a command with --model, which has no job file, calls the keys of one: --seq-len in place of train.seq_len."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from meshwright.errors import MeshwrightError
from meshwright.spec.run.layout_plan import Plan

_OPTIONS = {
    "model.source": "--model",
    "train.seq_len": "--seq-len",
    "train.global_batch_size": "--global-batch-size",
    "train.global_batch_tokens": "--global-batch-tokens",
    "adapter.targets": "--adapter-targets",
}
_VALUE = r"(?: = (?:'([^']*)'|\"([^\"]*)\"|([\w.]+)))?"
"""A key's value, as messages write it."""


def as_options(text: str, overrides: Sequence[str] = ()) -> str:
    """Return a message with options for keys; a key that is among the `overrides` keeps its name."""
    for key, option in _OPTIONS.items():
        if not any(word.startswith(f"{key}=") for word in overrides):
            text = re.sub(rf"(?<![\w.-]){re.escape(key)}(?!\w|\.\w){_VALUE}", _written_as(option), text)
    return text


def _written_as(option: str) -> Callable[[re.Match[str]], str]:
    return lambda found: " ".join((option, *filter(None, found.groups())))


@contextmanager
def option_words(is_named: bool, overrides: Sequence[str]) -> Iterator[None]:
    """Let errors name options where a model `is_named` by one."""
    try:
        yield
    except MeshwrightError as error:
        if is_named:
            error.args = (as_options(str(error), overrides),)
            error.listed = [as_options(text, overrides) for text in error.listed]
        raise


def plan_in_options(plan: Plan, overrides: Sequence[str]) -> Plan:
    """Return the plan of a model that is named by an option, whose reasons name options."""
    rejections = [one.replace(reason=as_options(one.reason, overrides)) for one in plan.rejections]
    return plan.model_copy(
        update={
            "rejections": tuple(rejections),
            "fsdp_alone_refusal": as_options(plan.fsdp_alone_refusal, overrides),
            "given_refusal": as_options(plan.given_refusal, overrides),
        }
    )
