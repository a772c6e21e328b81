"""Head and loss in chunks of tokens give the loss and the gradients of all logits at once, under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from compiler_warnings import DYNAMO_WARNINGS
from meshwright.models.contract import next_token_loss
from meshwright.parallelism.head import SeparateHead
from meshwright.parallelism.losses.chunked_loss import Chunking, chunked_loss, chunked_losses, cross_entropy_
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import parse_layout
from recorded_jobs import require_as_one_process, sums_job
from run_ranks import run_ranks

pytestmark = DYNAMO_WARNINGS

NUM_TOKENS, WIDTH, VOCABULARY = 22, 8, 36
BARS = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Answer(NamedTuple):
    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor


def _case(dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    hidden_TD = torch.randn(NUM_TOKENS, WIDTH, dtype=torch.float64)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    target_T = torch.randint(0, VOCABULARY, (NUM_TOKENS,))
    # A chunk without any target that counts, and one with a few.
    target_T[4:13] = -100
    return hidden_TD.to(dtype), head.to(dtype), target_T


def _of_tokens(losses_T: Tensor) -> Tensor:
    """Return a loss in which each token has a gradient of its own, one of them zero."""
    return losses_T @ torch.linspace(-1, 2, NUM_TOKENS, dtype=losses_T.dtype).square()


def _in_chunks(dtypes: list[torch.dtype], chunks: list[int], takes_tokens: bool) -> list[Answer]:
    """Return what this rank, which has a share of the vocabulary, finds."""

    def of_head(hidden_TD: Tensor, head: nn.Linear, target_T: Tensor, chunking: Chunking) -> Tensor:
        of_loss = hidden_TD, SeparateHead(head, lambda x: x), target_T, chunking
        return _of_tokens(chunked_losses(*of_loss)) if takes_tokens else chunked_loss(*of_loss)

    group = dist.group.WORLD
    assert group is not None
    answers = []
    for dtype in dtypes:
        for number in chunks:
            hidden_TD, whole, target_T = _case(dtype)
            head = nn.Linear(WIDTH, VOCABULARY // group.size(), dtype=dtype)
            with torch.no_grad():
                for name in ("weight", "bias"):
                    getattr(head, name).copy_(getattr(whole, name).chunk(group.size())[group.rank()])
            hidden_TD.requires_grad_()
            chunking = Chunking(number, group, splits_backward=False, cross_entropy=cross_entropy_)
            loss = of_head(hidden_TD, head, target_T, chunking)
            (3 * loss).backward()
            with torch.no_grad():
                # Without gradients the loss is the same.
                assert of_head(hidden_TD, head, target_T, chunking) == loss
            assert head.bias is not None
            dist.all_reduce(hidden_TD.grad)
            answers.append(Answer(loss.detach(), hidden_TD.grad, head.weight.grad, head.bias.grad))
    return answers


def _at_once(dtype: torch.dtype, takes_tokens: bool) -> Answer:
    hidden_TD, head, target_T = _case(dtype)
    hidden_TD.requires_grad_()
    losses_T = next_token_loss(F.linear(hidden_TD, head.weight, head.bias), target_T, reduction="none")
    loss = _of_tokens(losses_T) if takes_tokens else losses_T.sum() / NUM_TOKENS
    (3 * loss).backward()
    return Answer(loss.detach(), hidden_TD.grad, head.weight.grad, head.bias.grad)


@pytest.mark.parametrize("takes_tokens", [False, True], ids=["mean", "tokens"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chunks_give_the_loss_and_the_gradients_of_all_logits(num_ranks: int, takes_tokens: bool) -> None:
    chunks = [2, 5, NUM_TOKENS]
    found = run_ranks(_in_chunks, num_ranks, [*BARS], chunks, takes_tokens)
    for case, (dtype, _) in enumerate((dtype, number) for dtype in BARS for number in chunks):
        expected, bar = _at_once(dtype, takes_tokens), BARS[dtype]
        for rank, answers in enumerate(found):
            own = answers[case]
            torch.testing.assert_close(own.loss, expected.loss, rtol=bar, atol=0)
            parts = {
                "hidden": expected.hidden,
                **{name: getattr(expected, name).chunk(num_ranks)[rank] for name in ("weight", "bias")},
            }
            for name, part in parts.items():
                error = (getattr(own, name) - part).double().norm() / part.double().norm()
                assert error <= bar, (dtype, name, float(error))


LAYOUTS: dict[str, list[str]] = {
    "two ranks": ["tp=2,loss_chunks=3"],
    "one": ["loss_chunks=3", "loss_chunks=5,microbatch_size=2,activation_checkpoint=full"],
    "more of two": [
        "dp_shard=2,loss_chunks=32,microbatch_size=2,gradient_sync=step",
        "cp=2,cp_method=ring,loss_chunks=3",
        "pp=2,loss_chunks=4",
        "pp=2,schedule=ZBVZeroBubble,loss_chunks=4",
        "pp=2,schedule=InterleavedZeroBubble,loss_chunks=3",
    ],
    "four": [
        "dp_replicate=2,tp=2,loss_chunks=3",
        "dp_shard=2,cp=2,loss_chunks=2,activation_checkpoint=selective",
        "pp=2,tp=2,schedule=DualPipeV,loss_chunks=2",
        "pp=2,dp_shard=2,schedule=GPipe,loss_chunks=2,gradient_sync=microbatch",
        "tp=2,dp_shard=2,loss_chunks=2,compile=true,compile_backend=aot_eager",
        "pp=2,tp=2,schedule=ZBVZeroBubble,loss_chunks=2,compile=true,compile_backend=aot_eager",
    ],
}


def _require_equal(folder: Path, layouts: list[Layout], precision: str) -> None:
    """Compare each layout, each with a tied head and one of its own, with one process that has all logits at once."""
    alone, jobs = (
        [
            sums_job(folder, layout, {"tie_embeddings": ties}, precision=precision)
            for layout in group
            for ties in (False, True)
        ]
        for group in ([Layout()], layouts)
    )
    require_as_one_process(jobs, alone, layouts[0].num_ranks)


@pytest.mark.parametrize(
    "ranks", [pytest.param(name, marks=() if name == "two ranks" else pytest.mark.long) for name in LAYOUTS]
)
def test_layouts_train_as_one_process_with_all_logits(tmp_path: Path, ranks: str) -> None:
    _require_equal(tmp_path, [parse_layout(text) for text in LAYOUTS[ranks]], "float64")


@pytest.mark.long
def test_float32_stays_within_its_bars(tmp_path: Path) -> None:
    layouts = [parse_layout(text) for text in ("tp=2,loss_chunks=3", "pp=2,loss_chunks=4", "dp_shard=2,loss_chunks=8")]
    _require_equal(tmp_path, layouts, "float32")
