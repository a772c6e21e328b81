"""Every fitted number has a meaning and stays where physics lets it; and every one is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from cost_configs import changed, configs, training_setup
from meshwright.cost.constants import CostConstant, all_constants, fitted_constants, fixed_constant
from meshwright.cost.layout_table import ATTENTION_BACKENDS
from meshwright.cost.step_times import step_times
from meshwright.hardware.catalogue import cluster_names, load_cluster
from meshwright.spec.layout.layout import Layout
from repository import SOURCE


@pytest.mark.parametrize("name", all_constants())
def test_a_constant_is_within_its_bounds_and_says_what_it_means(name: str) -> None:
    constant: CostConstant = all_constants()[name]
    assert len(constant.meaning) > 10
    # A number is fitted, or says where it is from.
    assert bool(constant.spread) != bool(constant.source)
    assert 0 <= constant.low < constant.high
    assert constant.low <= constant.value <= constant.high
    assert constant.low <= constant.prior <= constant.high
    assert constant.value > 0
    assert constant.spread >= 0
    # What is not fitted stays where it started.
    assert constant.spread > 0 or constant.value == constant.prior


@pytest.mark.parametrize("name", all_constants())
def test_a_fit_stays_near_where_it_started(name: str) -> None:
    constant = all_constants()[name]
    if constant.spread:
        assert abs(math.log(constant.value / constant.prior)) < 4 * constant.spread


def test_shares_of_the_peak_are_below_it() -> None:
    for name, constant in all_constants().items():
        if name.startswith(("matmul", "attention.")):
            assert constant.high < 1, name


def test_only_what_is_not_fitted_is_kept_by_modules() -> None:
    assert fixed_constant("pcie_share") == 0.8
    with pytest.raises(ValueError, match="kernel_s is fitted"):
        fixed_constant("kernel_s")


def test_values_are_those_of_the_file() -> None:
    assert fitted_constants() == {name: constant.value for name, constant in all_constants().items()}


SOURCES = "".join(file.read_text(encoding="utf-8") for file in (SOURCE / "cost").rglob("*.py"))
SOURCES += "".join(path.read_text(encoding="utf-8") for path in (SOURCE / "planner").rglob("*.py"))
FORMATS = ("float8-tensorwise", "float8-rowwise", "mxfp8", "nvfp4")


class Recorded(Mapping[str, float]):
    """Constants that remember which of them were read."""

    def __init__(self) -> None:
        self.values_by_name, self.read = fitted_constants(), set[str]()

    def __getitem__(self, name: str) -> float:
        self.read.add(name)
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


@pytest.mark.slow
def test_every_constant_is_used() -> None:
    recorded = Recorded()
    of = training_setup("mixtral-8x7b")
    b200 = load_cluster("b200-ib400")
    capped = b200.replace(device=b200.device.replace(architecture="blackwell-limited"))
    ultra = load_cluster("gb300-nvl72")
    clusters = [load_cluster(name) for name in sorted(set(cluster_names()) - {"cpu-local", "local"})]
    variants = [
        *(training_setup(cluster=cluster, precision="float16") for cluster in (*clusters, capped)),
        *(training_setup(cluster=load_cluster(name), precision=FORMATS[0]) for name in ("mi300x-node", "l40s-node")),
        training_setup(cluster=load_cluster("mi355x-node"), precision="nvfp4"),
        *(changed(of, cuda_graphs=graphs) for graphs in ("routing", "blocks", "step")),
        *(training_setup(cluster=one, precision=name) for one in (b200, ultra) for name in FORMATS),
        *(training_setup(cluster=capped, precision=name) for name in FORMATS[:3]),
        *(training_setup("mixtral-8x7b", precision=name) for name in FORMATS[:3]),
        *(changed(of, kernels=kernels) for kernels in ("eager", "compiled", "fused")),
        changed(of, attention="unfused", fused_experts=True),
        changed(of, dispatcher="fused", tp_overlap=True, ep_overlap=True, p2p_overlap=False),
        changed(of, sharding="optimizer"),
        *(
            replace(training_setup(model, cluster, "meshwright"), attention_backend=backend)
            for model in ("llama3-8b", "llama3.2-1b")
            for cluster in ("h100-ib400", "dgx-b200")
            for backend in ATTENTION_BACKENDS
        ),
        changed(training_setup("mixtral-8x7b", precision="mxfp8"), low_precision_attention=True, kernels="fused"),
    ]
    for one in variants:
        step_times(configs(one, Layout(dp_shard=2)), recorded)
    assert {name for name in set(all_constants()) - recorded.read if not is_read_at_import(name)} == set()


def is_read_at_import(name: str) -> bool:
    """Return whether a module keeps the constant, which it reads by its name or by that of its family."""
    family = name.rpartition(".")[0]
    return f'fixed_constant("{name}")' in SOURCES or f'fixed_constant(f"{family}.{{' in SOURCES
