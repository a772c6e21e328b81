"""Collectives of a graph are joined and start early, on the groups that are named alone, and compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright.parallelism.graph.collective_buckets import Buckets

_OPS = torch.ops._c10d_functional
_RANKS, _DIM = 4, 8
_LETTERS = {
    _OPS.all_gather_into_tensor.default: "G",
    _OPS.reduce_scatter_tensor.default: "S",
    _OPS.all_reduce.default: "A",
    _OPS.wait_tensor.default: "w",
    torch.ops.aten.mm.default: ".",
}


def forward_of_layers(x: Tensor, *shards: Tensor, group: str = "fsdp") -> Tensor:
    for shard in shards:
        x = x @ _OPS.wait_tensor(_OPS.all_gather_into_tensor(shard, _RANKS, group))
    return x


def backward_of_layers(x: Tensor, *inputs: Tensor, sums: bool = False) -> tuple[Tensor, ...]:
    found = []
    for one in inputs:
        x = x @ one
        shard = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(x, "sum", _RANKS, "fsdp"))
        if sums:
            shard = _OPS.wait_tensor(_OPS.all_reduce(shard, "sum", "replicas"))
        found.append(shard * 2)
    return tuple(found)


def graph_of(function: Callable[..., object], num_layers: int, rows: int) -> fx.GraphModule:
    shards = [torch.ones(rows, _DIM) for _ in range(num_layers)]
    return make_fx(function, tracing_mode="fake")(torch.ones(_DIM, _DIM), *shards)


def order(graph: fx.GraphModule) -> str:
    return "".join(_LETTERS.get(node.target, "") for node in graph.graph.nodes)


def buckets(num_layers: int, prefetch: int = 1) -> Buckets:
    return Buckets(("fsdp", "replicas"), num_layers * _DIM * _DIM, _RANKS, prefetch)


@pytest.mark.parametrize(
    ("prefetch", "expected"), [(0, "Gw..Gw..Gw.."), (1, "GGw..Gw..w.."), (2, "GGGw..w..w.."), (9, "GGGw..w..w..")]
)
def test_two_layers_are_gathered_at_once_and_ahead(prefetch: int, expected: str) -> None:
    graph = graph_of(forward_of_layers, 6, _DIM // _RANKS)
    assert order(graph) == "Gw." * 6
    buckets(2, prefetch)(graph.graph)
    assert order(graph) == expected


def test_a_reduction_is_waited_for_when_the_next_one_has_started() -> None:
    graph = graph_of(backward_of_layers, 6, _DIM)
    assert order(graph) == ".Sw" * 6
    buckets(2)(graph.graph)
    assert order(graph) == "..S..Sw..Sww"


def test_sums_over_replicas_follow_the_shards_that_they_are_of() -> None:
    graph = graph_of(lambda *args: backward_of_layers(*args, sums=True), 6, _DIM)
    buckets(2)(graph.graph)
    assert order(graph) == "..S..SwA..SwAwwAww"


def test_a_large_tensor_is_a_bucket_of_its_own() -> None:
    graph = graph_of(forward_of_layers, 3, _DIM // _RANKS)
    Buckets(("fsdp",), 1, _RANKS, 1)(graph.graph)
    assert order(graph) == "GGw.Gw.w."


def test_other_groups_keep_their_collectives() -> None:
    graph = graph_of(lambda *args: forward_of_layers(*args, group="tp"), 4, _DIM // _RANKS)
    buckets(2)(graph.graph)
    assert order(graph) == "Gw." * 4


def test_a_gather_of_what_another_collective_made_stays_where_it_is() -> None:
    def again(x: Tensor, shard: Tensor) -> Tensor:
        whole = _OPS.wait_tensor(_OPS.all_gather_into_tensor(shard, _RANKS, "fsdp"))
        own = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(x @ whole, "sum", _RANKS, "fsdp"))
        return x @ _OPS.wait_tensor(_OPS.all_gather_into_tensor(own, _RANKS, "fsdp"))

    graph = graph_of(again, 1, _DIM // _RANKS)
    buckets(2)(graph.graph)
    assert order(graph) == "Gw.SwGw."


def test_a_reduction_that_gradients_depend_on_is_waited_for_at_once() -> None:
    def chain(x: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = []
        for one in inputs:
            keys = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(x, "sum", _RANKS, "fsdp"))
            x = x @ one + keys.repeat(_RANKS, 1)
            found.append(_OPS.wait_tensor(_OPS.reduce_scatter_tensor(x, "sum", _RANKS, "fsdp")))
        return tuple(found)

    graph = graph_of(chain, 4, _DIM)
    assert order(graph) == "Sw.Sw" * 4
    buckets(2)(graph.graph)
    assert order(graph) == "Sw..SwSSw..SwSww"


@pytest.mark.parametrize("function", [forward_of_layers, backward_of_layers])
def test_shapes_stay(function: Callable[..., object]) -> None:
    graph = graph_of(function, 5, _DIM // _RANKS if function is forward_of_layers else _DIM)
    shapes = shapes_of_output(graph)
    buckets(2)(graph.graph)
    assert shapes_of_output(graph) == shapes


def shapes_of_output(graph: fx.GraphModule) -> list[torch.Size]:
    (output,) = graph.graph.find_nodes(op="output")
    return [node.meta["val"].shape for node in output.all_input_nodes]


def test_its_description_says_what_differs() -> None:
    assert re.search(r"num_elements=128.*prefetch=3", repr(buckets(2, 3)))
