"""Memory pools that a layout or an optimizer cannot use are refused by name, and what is suggested is valid."""

from typing import Any

import pytest

from fixed_jobs import problems_left
from meshwright.hardware.catalogue import load_device
from meshwright.spec.job.job import Job
from meshwright.spec.job.memory_section import MemorySection
from meshwright.spec.job.rules.memory_rules import idle_group_keys, pool_device_problems
from meshwright.spec.job.validity import layout_problems
from meshwright.spec.layout.layout_text import parse_layout

JOB = Job.from_dict({"model": {"source": "llama-1m"}, "train": {"seq_len": 64, "global_batch_size": 16}})
IN_BACKWARD = {"in_backward": True, "max_grad_norm": 0.0}


@pytest.mark.parametrize(
    ("memory", "optimizer", "layout", "said"),
    [
        ({"embedding": "uvm"}, {}, "dp_shard=2,cpu_offload=true", 'memory.embedding = "uvm" has nothing to move'),
        ({"optimizer_state": "uvm"}, {}, "cpu_offload=true", 'memory.optimizer_state = "uvm" has nothing to move'),
        ({"optimizer_state": "uvm"}, {"state_dtype": "int8"}, "dp_shard=2", 'optimizer.state_dtype = "int8"'),
        ({"optimizer_state": "uvm"}, IN_BACKWARD, "microbatch_size=16", "optimizer.in_backward = true"),
        ({"communication": "nccl"}, {}, "dp_shard=2,compile=model", 'layout.compile = "model"'),
    ],
)
def test_what_cannot_be_is_refused_and_each_fix_is_valid(
    memory: dict[str, Any], optimizer: dict[str, Any], layout: str, said: str
) -> None:
    job = Job.from_dict({**JOB.to_dict(), "memory": memory, "optimizer": optimizer})
    found = [one for one in layout_problems(job, parse_layout(layout)) if said in one]
    assert len(found) == 1
    assert len(found[0].fixes) >= 2
    for fix in found[0].fixes:
        assert not problems_left(job, parse_layout(layout), fix)


@pytest.mark.parametrize(
    ("memory", "device", "said"),
    [
        ({"communication": "nccl"}, "a100-sxm-80gb", "needs a GPU with multicast (Hopper or newer)"),
        ({"communication": "symmetric"}, "a100-sxm-80gb", ""),
        ({"communication": "nccl"}, "h100-sxm", ""),
        ({"communication": "symmetric"}, "rtx-4090", "rtx-4090 has no peer access"),
        ({"communication": "symmetric"}, "mi300x", 'memory.communication = "symmetric" needs an NVIDIA GPU'),
        ({"optimizer_state": "uvm"}, "mi300x", 'memory.optimizer_state = "uvm" needs an NVIDIA GPU, and mi300x is amd'),
        ({"embedding": "uvm"}, "v100-sxm-16gb", ""),
        ({"embedding": "uvm"}, "cpu-local", ""),
    ],
)
def test_what_a_device_of_the_catalogue_lacks_is_said_before_it_runs(
    memory: dict[str, str], device: str, said: str
) -> None:
    found = list(pool_device_problems(MemorySection.from_dict(memory), load_device(device)))
    assert len(found) == bool(said)
    assert all(said in one and one.fixes for one in found)


def test_keys_of_groups_that_no_rank_shares_are_idle() -> None:
    memory = MemorySection(communication="nccl")
    layout = parse_layout("tp=2,separate_reduce_group=true")
    assert len(list(idle_group_keys(memory, layout))) == 2
    assert not list(idle_group_keys(memory, layout.replace(dp_shard=2)))


@pytest.mark.parametrize(
    "layout", ["dp_shard=4", "tp=2", "pp=2", "dp_shard=2,activation_offload=true", "compile=model"]
)
def test_state_in_managed_memory_goes_with_other_layouts(layout: str) -> None:
    memory = {"embedding": "uvm", "optimizer_state": "uvm"}
    job = Job.from_dict({**JOB.to_dict(), "memory": memory, "optimizer": {"name": "muon"}})
    assert not [one for one in layout_problems(job, parse_layout(layout)) if "memory." in one]
