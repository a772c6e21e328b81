"""Anybody's step is traced, and one that cannot be says why: the operator, the module, the line, what to do."""

from __future__ import annotations

import pytest

from meshwright.errors import UnsupportedError
from meshwright.spec.trace.trace import Trace
from meshwright.tracer.programs.trace_ranks import trace
from repository import ROOT
from trained_step import BUILD, arguments_of

EXAMPLES = ROOT / "examples"


def ops(found: Trace) -> list[str]:
    return [found.signatures[position].op for position in found.records.signature if position >= 0]


@pytest.mark.parametrize(
    ("build", "collective", "scope"),
    [
        ("data_parallel", "c10d.allreduce_.default", "layers.0.up"),
        pytest.param("fully_sharded", "c10d._reduce_scatter_base_.default", "layers.1.down", marks=pytest.mark.long),
        pytest.param(
            "tensor_parallel",
            "_c10d_functional.all_gather_into_tensor.default",
            "layers.0.norm",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_step_by_torchs_own_parallelism_is_traced(build: str, collective: str, scope: str) -> None:
    found = trace(f"user_steps:{build}", 5, 8)
    assert collective in ops(found)
    assert tuple(range(8)) in found.groups
    assert scope in found.scopes
    # The second layer is recomputed in backward.
    assert set(found.phases) == {"forward", "backward", "recompute", "optimizer"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "layout"),
    [
        ("spectral_denoiser.toml", ("layout.dp_shard=4",)),
        ("hf_causal_lm.toml", ("layout.dp_shard=4",)),
        ("hf_causal_lm.toml", ("layout.dp_shard=4", "layout.activation_checkpoint=full")),
    ],
)
def test_models_of_others_are_traced(job: str, layout: tuple[str, ...]) -> None:
    found = trace(BUILD, 1, 4, arguments_of(str(EXAMPLES / job), "layout.microbatch_size=4", *layout))
    assert "c10d._reduce_scatter_base_.default" in ops(found)


MESSAGES = {
    "size": r"int\(\) in layers.1 \(.*untraceable_steps.py:\d+\) reads an integer .* take sizes from shapes",
    "kernel": r"untraceable.halve.default in layers.1 .* torch.library.register_fake\(\"untraceable::halve\"\)",
    "objects": r"torch.distributed.all_gather_object in layers.1 .*: it sends pickled objects",
    "list": r"tolist\(\) or int\(\) in layers.1",
    "mask": r"aten.(index.Tensor|nonzero.default) in layers.1",
    "memory": r"in layers.1 .*untraceable_steps.py",
    "mistake": r"RuntimeError in layers.1 \(.*untraceable_steps.py:\d+\): ",
    "nonzero": r"aten.nonzero.default in layers.1 \(.*untraceable_steps.py:\d+\): its shape depends on values",
}
QUICK = ("size", "kernel", "objects")


LONG = tuple(pytest.param(reason, marks=pytest.mark.long) for reason in MESSAGES if reason not in QUICK)


@pytest.mark.parametrize("reason", [*QUICK, *LONG])
def test_what_cannot_be_traced_is_told_in_one_message(reason: str) -> None:
    said = rf"^rank 0 of 4 of untraceable_steps:build cannot be traced: .*{MESSAGES[reason]}"
    with pytest.raises(UnsupportedError, match=said) as caught:
        trace("untraceable_steps:build", 0, 4, [reason])
    assert "Traceback" not in str(caught.value)
    assert "site-packages" not in str(caught.value)
