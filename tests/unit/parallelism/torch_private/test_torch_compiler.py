"""Private settings of torch's compiler do what they are set for, with the installed torch."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiler_warnings import COMPILER_WARNINGS
from meshwright.parallelism.torch_private.torch_compiler import save_meshes_last


class _Drops(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        place = functools.partial(DTensor.from_local, device_mesh=mesh, placements=[Shard(0)], run_check=False)
        self.up = nn.Parameter(place(torch.randn(8, 6)))
        self.down = nn.Parameter(place(torch.randn(6, 8)))

    def forward(self, x_BD: Tensor) -> Tensor:
        hidden_BF = F.dropout(F.silu(F.linear(x_BD, self.up.to_local())), 0.5)
        return F.dropout(F.linear(hidden_BF, self.down.to_local()), 0.5)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@COMPILER_WARNINGS
def test_a_compiled_block_drops_the_same_again(mesh: DeviceMesh) -> None:
    save_meshes_last()
    model = _Drops(mesh)
    expected = _output_and_gradients(model, model)
    compiled = checkpoint_wrapper(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for found, one in zip(_output_and_gradients(compiled, model), expected, strict=True):
        torch.testing.assert_close(found, one)


def _output_and_gradients(module: nn.Module, model: nn.Module) -> list[Tensor]:
    """Return the output of `module`, and gradients with respect to its input and the parameters of `model` in it."""
    torch.manual_seed(1)
    x_BD = torch.randn(4, 6, requires_grad=True)
    y_BD = module(x_BD)
    gradients = torch.autograd.grad(y_BD.square().sum(), [x_BD, *model.parameters()])
    return [y_BD, *(one.to_local() if isinstance(one, DTensor) else one for one in gradients)]


_TRUSTS = """
import torch
from meshwright.parallelism.torch_private.torch_compiler import trust_vector_instructions
trust_vector_instructions()
print(torch._inductor.config.cpp.vec_isa_ok)
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="others have no such tests")
@pytest.mark.parametrize(
    ("series", "said", "trusts"),
    [
        ("12", None, "True"),
        pytest.param("9.4.0", None, "None", marks=pytest.mark.long),
        pytest.param("13.2.0", None, "True", marks=pytest.mark.long),
        pytest.param("12", "0", "False", marks=pytest.mark.long),
    ],
)
def test_tests_of_vector_instructions_are_left_to_old_compilers(
    series: str, said: str | None, trusts: str, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho {series}\n")
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler)}
    environment |= {"TORCHINDUCTOR_VEC_ISA_OK": said} if said else {}
    done = subprocess.run((sys.executable, "-c", _TRUSTS), capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"{trusts}\n"
