"""What the tracer's patches rely on, in the torch at hand: whoever installs another sees which of them is wrong."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives, device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as data_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import UnsupportedError
from meshwright.tracer.programs.trace_ranks import trace
from meshwright.tracer.record.op_call import flops_of
from meshwright.tracer.record.simulated_device import SimulatedStream
from meshwright.tracer.torch_patches import torch_autocast
from meshwright.tracer.torch_patches.torch_names import ONLY_IN, RELEASE, replace
from meshwright.tracer.torch_patches.torch_patches import LazyChunks

TRACER = Path(importlib.import_module("meshwright.tracer").__path__[0])
RANK, NUM_RANKS = 2, 4


def replaced_names() -> Iterator[tuple[Any, str]]:
    """Yield what each replace() in the tracer replaces: the module or class, and the name."""
    for file in sorted(TRACER.glob("*/torch_*.py")):
        module = importlib.import_module(f"meshwright.tracer.{file.parent.name}.{file.stem}")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_ours = vars(module).get("replace") is replace
            if is_ours and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "replace":
                owners, name = node.args[:2]
                assert isinstance(name, ast.Constant)
                found = eval(ast.unparse(owners), vars(module))
                yield from ((owner, str(name.value)) for owner in (found if isinstance(found, tuple) else (found,)))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=NUM_RANKS)
    yield init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Spy:
    """Stands in for one of torch's names, and notices whether torch looks there."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original, self.calls, self.is_inside = original, list[tuple[Any, ...]](), False

    def __get__(self, instance: Any, _: Any) -> Any:
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(args)
        self.is_inside = True
        try:
            return self.original(*args, **kwargs)
        finally:
            self.is_inside = False


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Spy:
    spy = Spy(getattr(owner, name))
    monkeypatch.setattr(owner, name, spy)
    return spy


def test_what_is_replaced_is_there() -> None:
    found = list(replaced_names())
    assert len(found) > 10
    wanted = [(owner, name) for owner, name in found if RELEASE in ONLY_IN.get(name, (RELEASE,))]
    assert [f"{owner.__name__}.{name}" for owner, name in wanted if not hasattr(owner, name)] == []


def test_a_name_that_is_not_there_is_told_with_the_version() -> None:
    major, minor = RELEASE
    said = rf"^torch {major}\.{minor}\..* has no torch\.nn\.functional\.relu17, .*: install torch 2\.11 to 2\.15$"
    with pytest.raises(UnsupportedError, match=said):
        replace(F, "relu17", lambda original: original)


def test_a_compiler_that_is_not_there_is_told_with_the_key() -> None:
    said = (
        rf"torch {RELEASE[0]}\.{RELEASE[1]}\..* has another compiler than .*graph.*: install torch 2\.11 to 2\.15, "
        "or set layout.compile to false$"
    )
    with pytest.raises(UnsupportedError, match=said):
        trace("untraceable_steps:without_compiler", 0, 2)


def test_a_mesh_asks_here_for_its_groups(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    spy = spied(monkeypatch, device_mesh, "new_group")
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    assert len(spy.calls) == 4
    # All is given by name, but for nothing.
    assert set(spy.calls) == {()}
    assert made.get_group("pp").group_desc == "mesh_pp"


@pytest.mark.parametrize("rows", [8, 5, 3, 1])
def test_fsdp_cuts_here_and_gets_the_same(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh, rows: int) -> None:
    tensor, cut = torch.randn(rows, 6), _fsdp_param._chunk_with_empty
    lazy = LazyChunks(tensor, NUM_RANKS, 0)
    assert all(chunk.equal(lazy[place]) for place, chunk in enumerate(cut(tensor, NUM_RANKS, 0)))
    monkeypatch.setattr(_fsdp_param, "_chunk_with_empty", spy := Spy(LazyChunks))
    layer = nn.Linear(6, rows, bias=False)
    weight = layer.weight.detach().clone()
    fully_shard(layer, mesh=mesh)
    assert spy.calls
    # An empty share has lost its other dims in torch's own list.
    assert layer.weight.to_local().tolist() == cut(weight, NUM_RANKS, 0)[RANK].tolist()  # type: ignore[operator]


def test_fsdp_looks_here_for_parameters(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    spy = spied(monkeypatch, _fsdp_init, "_get_managed_states")
    layer = nn.Linear(2, 2)
    fully_shard(layer, mesh=mesh)
    assert [modules for modules, *_ in spy.calls] == [[layer]]


class Watch(TorchDispatchMode):
    """Notes which operators run, with the shape of the result and whether within `spy`; DTensor's own come again."""

    def __init__(self, spy: Spy | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spy, self.seen = spy, list[tuple[Any, torch.Size, bool]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.append((func, result.shape, self.spy is not None and self.spy.is_inside))
        return result


def test_dtensor_runs_operators_on_whole_tensors_here_only(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    sharded = distribute_tensor(torch.ones(8, 7), mesh, [Shard(0)])
    right = distribute_tensor(torch.ones(7, 3), mesh)
    spy = spied(monkeypatch, ShardingPropagator, "_propagate_tensor_meta_non_cached")
    with Watch(spy) as watch:
        torch.mm(sharded, right)
    product = torch.ops.aten.mm.default
    found = {(shape, is_inside) for func, shape, is_inside in watch.seen if func is product}
    assert found == {((8, 3), True), ((2, 3), False)}


@pytest.mark.parametrize("is_tracing", [True, False])
def test_a_collective_asks_here_whether_to_wait_at_once(
    monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh, is_tracing: bool
) -> None:
    with FakeTensorMode(), Watch() as watch:
        assert _functional_collectives._are_we_tracing()
        monkeypatch.setattr(_functional_collectives, "_are_we_tracing", lambda: is_tracing)
        _functional_collectives.all_reduce(torch.ones(2), "sum", mesh)
    operators = [func for func, *_ in watch.seen]
    assert torch.ops._c10d_functional.all_reduce.default in operators
    assert (torch.ops._c10d_functional.wait_tensor.default in operators) == is_tracing


def test_data_parallel_looks_here(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    asked = list[str]()
    monkeypatch.setattr(data_parallel, "_verify_param_shape_across_processes", lambda *_: asked.append("shapes"))
    monkeypatch.setattr(dist.Reducer, "_rebuild_buckets", lambda _: asked.append("buckets"))
    DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2))
    assert asked == ["shapes", "buckets"]


def test_autocast_has_the_operators_of_cuda() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    wanted = {name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, "AutocastCUDA")}
    # What a build with CUDA calls inside of others, what CUDA refuses, and named dims, which 2.12 gave up.
    wanted -= {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::binary_cross_entropy"}
    wanted = {name for name in wanted - {"aten::_cudnn_rnn"} if "name" not in name.partition(".")[2].lower()}
    of = torch_autocast
    lists = (of.LOWER_PRECISION, of.FLOAT32, of.FLOAT32_RESULT, of.WIDEST)
    found = {f"aten::{name}" for names in lists for name in names}
    # Cast since 2.12, and since 2.15.
    assert found - wanted <= {"aten::rms_norm"}
    assert wanted - found <= {"aten::linalg_matrix_sqrth"}


def test_kernels_of_attention_take_these_arguments() -> None:
    def names(operator: Any) -> list[str]:
        return [argument.name for argument in operator.default._schema.arguments]

    flash = names(torch.ops.aten._scaled_dot_product_flash_attention)
    efficient = names(torch.ops.aten._scaled_dot_product_efficient_attention)
    tensors = ["query", "key", "value"]
    assert flash == [*tensors, "dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert efficient == [*tensors, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"]
    # Of torch's own function by place, as by name.
    x = torch.randn(3, 1, 2, 4, 4)
    by_name = F.scaled_dot_product_attention(*x, attn_mask=None, dropout_p=0.0, is_causal=True)
    assert F.scaled_dot_product_attention(*x, None, 0.0, True).equal(by_name)


@pytest.mark.parametrize("name", ["aten::silu_backward", "aten::_fused_rms_norm"])
def test_these_have_no_kernel_yet(name: str) -> None:
    assert getattr(torch.ops.aten, name.removeprefix("aten::"))
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("key_heads", [1, 2, 8])
def test_attention_of_grouped_heads_is_counted(kernel: str, key_heads: int) -> None:
    query, key = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, key_heads, 16, 4, device="meta")
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    product = 2 * 2 * 8 * 16 * 16 * 4
    assert flops_of(forward, (query, key, key), {}, None) == 2 * product
    assert flops_of(backward, (query, query, key, key), {}, None) == 5 * product


def test_a_stream_is_told_by_numbers() -> None:
    real, simulated = torch.Stream(device="cpu"), SimulatedStream()
    for name in ("stream_id", "device_index", "device_type"):
        assert type(getattr(simulated, name)) is type(getattr(real, name)) is int


def test_nodes_of_the_graph_are_numbered_as_they_are_made() -> None:
    leaf: Tensor = torch.ones(2, requires_grad=True)
    first = torch._C._autograd._get_sequence_nr()
    made: list[Any] = [(leaf * 2).grad_fn, (leaf * 3).grad_fn]
    assert [node._sequence_nr() for node in made] == [first, first + 1]
    assert made[0].next_functions[0][0]._sequence_nr() == 2**64 - 1
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._current_autograd_node() is None
