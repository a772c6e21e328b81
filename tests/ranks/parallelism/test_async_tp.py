"""The compiler joins our matmuls with the collectives next to them.

The joint operations exist on CUDA only; here they are ours, which compute the same in the plain order, and count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed import _symmetric_memory
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import GraphModule

from compiler_warnings import COMPILER_WARNINGS
from meshwright.log import logger
from meshwright.parallelism.collectives import all_gather_dim, reduce_scatter_dim
from meshwright.parallelism.tensor import tensor_parallel
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from run_ranks import run_ranks
from tensor_parity import TINY, Found, meta_model, of_one_process, of_this_rank, worst


def _gather_matmul(
    part: Tensor, weights: list[Tensor], dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    # Memory is laid out as torch promises its compiler: the gathered dim outermost.
    whole = all_gather_dim(part.movedim(dim, 0), 0, _resolve_process_group(group_name))
    return whole.movedim(0, dim) if return_A else None, [(whole @ weight).movedim(0, dim) for weight in weights]


def _matmul_scatter(x: Tensor, weight: Tensor, reduction: str, dim: int, group_name: str) -> Tensor:
    assert reduction == "sum"
    return reduce_scatter_dim(x @ weight, dim, _resolve_process_group(group_name))


def _on_a_rank(architecture: LlamaArchitecture, layout: Layout, only_pass: bool) -> tuple[Found, Counter[str]]:
    calls: Counter[str] = Counter()

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[operation.__name__] += 1
            return operation(*args, **options)

        return call

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", counted(_gather_matmul), "CPU")
    library.impl("fused_matmul_reduce_scatter", counted(_matmul_scatter), "CPU")
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(tensor_parallel, "has_symmetric_memory", return_value=True),
        _symmetric_memory._test_mode(),
    ):
        model = meta_model(architecture, torch.float32)
        found = of_this_rank(model, layout, backend=_pass_only if only_pass else None)
    return found, calls


def _pass_only(model: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile as inductor does until its pass has run, then run the graphs op by op: no C++, which takes minutes."""
    # Imported here: importing them warns, and takes seconds.
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass  # noqa: PLC0415
    from torch._inductor.fx_passes.post_grad import view_to_reshape  # noqa: PLC0415

    def inner(graph: GraphModule, *args: Any, **options: Any) -> Callable[..., Any]:
        view_to_reshape(graph)
        if torch._inductor.config._micro_pipeline_tp:
            micro_pipeline_tp_pass(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    return compile_fx(model, inputs, inner_compile=inner)


@COMPILER_WARNINGS
@pytest.mark.long
@pytest.mark.parametrize("only_pass", [True, False])
def test_matmuls_are_joined_with_their_communication(monkeypatch: pytest.MonkeyPatch, only_pass: bool) -> None:
    # No pool of compiler processes for each rank.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    architecture = LlamaArchitecture(**TINY)
    expected_loss, expected = of_one_process(meta_model(architecture, torch.float32))
    layout = Layout(tp=2, compile=True, async_tp=True)
    for (loss, gradients), calls in run_ranks(_on_a_rank, 2, architecture, layout, only_pass, timeout_s=110):
        # In each block's forward: into attention and into the ffn. In backward: into the output projection and into
        # down. Nothing else can be: what flows back from query, key and value is summed before it is scattered.
        assert calls["_gather_matmul"] == (2 + 2) * architecture.num_layers
        assert calls["_matmul_scatter"] == 2 * architecture.num_layers
        assert loss == pytest.approx(expected_loss, rel=2e-6)
        assert worst(gradients, expected)[0] <= 1e-5


def test_a_device_without_shared_memory_computes_in_the_plain_order_and_says_so() -> None:
    architecture = LlamaArchitecture(**TINY)
    expected_loss, _ = of_one_process(meta_model(architecture, torch.float32))
    results = run_ranks(_with_warnings, 2, architecture, Layout(tp=2, async_tp=True))
    for (loss, _), _ in results:
        assert loss == pytest.approx(expected_loss, rel=2e-6)
    # Once, and not by every rank.
    assert [len(warned) for _, warned in results] == [1, 0]
    assert "layout.async_tp = true has no effect on cpu" in results[0][1][0]


def _with_warnings(architecture: LlamaArchitecture, layout: Layout) -> tuple[Found, list[str]]:
    with mock.patch.object(logger, "warning") as warning:
        found = of_this_rank(meta_model(architecture, torch.float32), layout)
    return found, [call.args[0] % call.args[1:] for call in warning.call_args_list]
