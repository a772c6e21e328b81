"""Which linear layers become float8, and what is said of the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.models.build import build_model
from meshwright.parallelism.float8 import float8_kernels
from meshwright.parallelism.float8.convert_linears import convert_linears
from meshwright.spec.job.sections import ModelSection, PrecisionSection
from meshwright.spec.layout.layout import Layout

MESHES: Any = SimpleNamespace(device_type="cpu", degree=lambda axis: 1, layout=Layout())


def model(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return build_model(ModelSection(source="llama-1m", options={"num_layers": 2, **options}))


def float8_layers(stage: nn.Module) -> list[str]:
    return [name for name, module in stage.named_modules() if hasattr(module, "shard_groups")]


def test_without_float8_nothing_is_converted() -> None:
    stage = model()
    assert convert_linears([stage], MESHES, PrecisionSection()) is None
    assert float8_layers(stage) == []


def test_all_linear_layers_of_blocks_but_those_skipped_and_those_that_kernels_do_not_take() -> None:
    pytest.importorskip("torchao", reason="needs meshwright[torchao]")
    stage = model(ffn_dim=40)
    precision = PrecisionSection(compute="bfloat16", float8="tensorwise", float8_skip=("blocks.0.*", "*.key"))
    report = convert_linears([stage], MESHES, precision)
    assert float8_layers(stage) == [f"blocks.1.attention.{name}" for name in ("query", "value", "output")]
    assert report is not None
    assert not report.is_fallback
    assert report.text.startswith("float8 tensorwise: 3 linear layers of blocks; in bfloat16 stay blocks.0.")
    assert "not multiples of 16" in report.text


def test_without_torchao_layers_stay_and_the_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_kernels, "find_spec", lambda name: None)
    stage = model()
    report = convert_linears([stage], MESHES, PrecisionSection(compute="bfloat16", float8="rowwise"))
    assert float8_layers(stage) == []
    assert report is not None
    assert report.is_fallback
    assert "torchao is not installed" in report.text
    assert "14 linear layers of blocks are computed in bfloat16" in report.text
