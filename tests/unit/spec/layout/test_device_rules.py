"""What a layout asks of a device that lacks it is refused by name, and the search leaves it out."""

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.config.load import load_job
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.hardware.catalogue import load_device
from meshwright.planner.read_request import Options, plan_request
from meshwright.planner.search.menu import menu_of
from meshwright.spec.layout.device_rules import layout_device_problems
from meshwright.spec.layout.layout_text import parse_layout
from questions import ask

JOB = """
[model]
source = "llama3-8b"
[train]
seq_len = 4096
global_batch_size = 64
[precision]
compute = "bfloat16"
"""


@pytest.mark.parametrize(
    ("layout", "device", "said"),
    [
        ("attention_backend=cudnn", "mi300x", 'layout.attention_backend = "cudnn" needs an NVIDIA GPU, and mi300x is'),
        ("attention_backend=varlen", "mi355x", 'layout.attention_backend = "varlen" needs an NVIDIA GPU'),
        ("attention_backend=flash", "mi300x", ""),
        ("attention_backend=cudnn", "h100-sxm", ""),
        ("attention_backend=flash", "v100-sxm-16gb", "needs an NVIDIA GPU of Ampere or newer (compute capability 8.0)"),
        ("attention_backend=cudnn", "v100-sxm-32gb", "and v100-sxm-32gb is nvidia's volta: set layout.attention_back"),
        ("attention_backend=varlen", "v100-sxm-32gb", 'to "efficient" or "auto"'),
        ("attention_backend=efficient", "v100-sxm-32gb", ""),
        ("attention_backend=flash", "a100-sxm-40gb", ""),
        ("attention_backend=varlen", "rtx-a6000", ""),
        ("tp=2,async_tp=true,compile=true", "mi300x", "layout.async_tp = true needs an NVIDIA GPU"),
        ("tp=2,async_tp=true,compile=true", "rtx-4090", "rtx-4090 has no peer access"),
        ("tp=2,async_tp=true,compile=true", "a100-pcie-80gb", ""),
        ("tp=2,async_tp=true,compile=true", "cpu-local", ""),
        ("communication_sms=16", "mi300x", "layout.communication_sms = 16 limits NCCL's kernels"),
    ],
)
def test_what_a_device_lacks_is_said_with_a_layout_that_it_takes(layout: str, device: str, said: str) -> None:
    asked = parse_layout(layout)
    found = list(layout_device_problems(asked, load_device(device)))
    assert len(found) == bool(said)
    for problem in found:
        assert said in problem
        for fix in problem.fixes:
            changes = {key.removeprefix("layout."): value for key, value in fix.items()}
            assert not list(layout_device_problems(asked.replace(**changes), load_device(device)))


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [
        ("mi300x-ib400:8", "layout.attention_backend=cudnn"),
        ("mi300x-ib400:8", "layout.async_tp=true"),
        ("rtx-4090-node:8", "memory.communication=symmetric"),
    ],
)
def test_a_plan_with_a_key_that_the_device_lacks_is_an_error(tmp_path: Path, cluster: str, asked: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    resolved = load_job(path, (asked, "layout.search=true"))
    with pytest.raises(UnsupportedError, match=f"^{asked.partition('=')[0]} = .* needs .*, and (mi300x|rtx-4090) "):
        plan_request(resolved, Options(cluster=cluster))


@pytest.mark.parametrize("backend", ["flash", "cudnn", "varlen"])
def test_check_and_plan_refuse_kernels_that_volta_has_not(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("bfloat16", "float32"))
    key = f"layout.attention_backend={backend}"
    said = f'attention_backend = "{backend}" needs an NVIDIA GPU of Ampere or newer .* set .* to "efficient" or "auto"'
    with pytest.raises(ConfigError, match=said):
        mw.check(str(path), key, "cluster.name=v100-opa400", "cluster.num_devices=8", "layout.dp_shard=8")
    with pytest.raises(UnsupportedError, match=said):
        mw.plan(None, key, model="llama3-8b", cluster="v100-opa400:64", precision="float16", global_batch_tokens="1M")


@pytest.mark.parametrize(
    ("cluster", "values"), [("h100-ib400", (False, True)), ("mi300x-ib400", (False,)), ("rtx-4090-node", (False,))]
)
def test_the_search_tries_async_tp_where_devices_share_memory(cluster: str, values: tuple[bool, ...]) -> None:
    assert menu_of(ask("llama3-8b", 8, cluster=cluster)).async_tp == values
