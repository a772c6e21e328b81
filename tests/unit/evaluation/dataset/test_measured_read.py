"""A file of measured runs: every row is a configuration or says why not, whatever its cells hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measured_rows import DENSE, LATENT, MIXTURE, PIPELINE, ROWS, row
from meshwright.cost.achieved_rates import peaks_of
from meshwright.cost.layout_table import layout_table
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.evaluation.dataset.read import MeasuredRun, measured_run, read_runs

COLUMNS = sorted({name for one in ROWS for name in one} | {"dp", "ep", "vpp", "grad_accum", "notes", "source_family"})
COLUMNS += ["assume", "framework", "tuned", "kernels", "dispatcher", "fsdp_group", "etp", "gradient_dtype"]
COLUMNS += ["early_stop", "release", "mtp_modules"]
COLUMNS += ["sp", "compile", "flash_attn", "async_tp", "nvlink_domain", "tokens_per_s_per_gpu", "step_time_calc_s"]
NUMBERS = ["0", "-1", "1", "2", "3", "7", "64", "8.5", "1e30", "1e400", "nan", "inf", "-inf", "999999999", "1,5", "1_0"]
WORDS = ["", " ", "x", "yes", "no", "none", "full", "selective", "hsdp", "fp4", "FP8 ", "null", "[]", "\x00", "４"]
PLACES = ["cpu-local", "H100 limited", "b200 LIMITED", "tpu-v5p", "0 Gb/s", "8x HDR 200 Gb/s per node", "Omni-Path"]
NOTES = ["vpp=2", "vpp=2; vocab=7; micro_batch=x", "fsdp_group=3", "activation_ckpt=full", "tp=2", "vpp=", "fused"]
KEYS = ["head_dim", "sliding_window", "swa_alternate", "first_dense", "moe_ffn", "shared_experts", "q_lora", "kv_lora"]
SHAPES = st.dictionaries(
    st.sampled_from([*KEYS, "qk_nope", "qk_rope", "v_head", "attn", "pos"]),
    st.sampled_from(["null", '"x"', '"MLA"', "-3", "0", "1", "1.5", "128", "1e300", "[]", "{}", "true"]),
    max_size=4,
).map(lambda pairs: "{" + ", ".join(f'"{key}": {value}' for key, value in pairs.items()) + "}")
CELLS = st.one_of(st.sampled_from([*NUMBERS, *WORDS, *PLACES, *NOTES]), SHAPES, st.text(max_size=12))


@pytest.mark.parametrize("of", ROWS, ids=lambda of: of["id"])
def test_a_good_row_is_a_case(of: dict[str, str]) -> None:
    run = measured_run(row(of))
    assert run.unsupported_reason == ""
    assert run.is_supported
    assert run.setup is not None
    assert run.layout is not None
    assert run.layout.num_ranks == run.setup.cluster.num_devices == 64
    assert run.setup.workload.global_batch_size == 128
    assert run.setup.stack.name == of["stack"]


@pytest.mark.slow
@settings(max_examples=100)
@given(st.sampled_from(ROWS), st.dictionaries(st.sampled_from(COLUMNS), CELLS, min_size=1, max_size=6))
def test_any_cells_make_a_case_or_a_reason(of: dict[str, str], cells: dict[str, str]) -> None:
    run = measured_run({**of, **cells})
    assert run.is_supported == (run.unsupported_reason == "")
    assert (run.layout is None) == (run.setup is None)
    if run.setup is None or run.layout is None:
        assert len(run.unsupported_reason) > 10
        return
    assert run.layout.num_ranks == run.setup.cluster.num_devices
    try:
        peaks_of((run.setup,))
    except UnsupportedError:
        return  # The catalogue lacks a figure of the device.
    seconds = step_times(Configurations.of_one(run.setup, layout_table([run.layout]))).total_s
    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["step_time_s", "step_time_calc_s", "mem_gb_per_gpu", "n_gpus"]), CELLS))
def test_what_was_measured_is_a_number_or_nothing_or_refused(cells: dict[str, str]) -> None:
    found = measured_run({**DENSE, **cells}).row
    for name in ("measured_s", "measured_bytes"):
        try:
            value = getattr(found, name)
        except UnsupportedError:
            continue
        assert value is None or np.isfinite(value)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "Voodoo 2"}, "gpu = 'Voodoo 2' is no device of the catalogue"),
        ({"gpu": "H100 power limited"}, "gpu is a h100-sxm under a power limit, whose rates are unknown"),
        ({"precision": "int3"}, "precision = 'int3': must be one of "),
        ({"n_layers": "many"}, "n_layers = 'many' is no number"),
        ({"n_layers": "32.5"}, "n_layers = '32.5' is no positive whole number"),
        ({"n_layers": "0"}, "n_layers = '0' is no positive whole number"),
        ({"n_layers": "1e30"}, "n_layers = '1e30' is more than any run has"),
        ({"hidden": None}, "hidden is empty: it is required"),
        ({"seq_len": None}, "seq_len is empty: it is required"),
        ({"tp": "3"}, "tp=3 x cp=1 x pp=1 do not divide n_gpus=64"),
        ({"global_batch": "33"}, "global_batch=33 does not divide by dp=32"),
        ({"micro_batch": "3"}, "global_batch=128 does not divide by dp=32 x micro_batch=3"),
        ({"activation_ckpt": "some"}, "activation_ckpt = 'some' must be one of none, selective, full"),
        ({"arch_json": "{'head_dim': 64}"}, "is no JSON object"),
        ({"arch_json": "[64]"}, "is no JSON object"),
        ({"assume": "tp=2"}, "assume = 'tp=2': write COLUMN=VALUE; ... with columns of activation_ckpt, "),
        ({"assume": "vpp"}, "assume = 'vpp': write COLUMN=VALUE"),
        ({"vocab": None, "assume": "vocab=many"}, "vocab = 'many' is no number"),
        ({"arch_json": '{"head_dim": "wide"}'}, "arch_json has head_dim = 'wide', which is no whole number"),
        ({"arch_json": '{"attn": "mla", "kv_lora": 512}'}, "arch_json has attn = MLA but no qk_nope, qk_rope, v_head"),
    ],
)
def test_a_row_that_cannot_be_priced_says_which_cell_and_why(cells: dict[str, Any], reason: str) -> None:
    run = measured_run(row(**cells))
    assert not run.is_supported
    assert reason in run.unsupported_reason


def test_more_stages_than_blocks_are_refused() -> None:
    run = measured_run(row(PIPELINE, vpp=16))
    assert run.unsupported_reason == "pp=4 x vpp=16 are more stages than n_layers=32 fill"


def test_a_mixture_without_its_number_of_chosen_experts_is_refused() -> None:
    assert measured_run(row(MIXTURE, moe_topk=None)).unsupported_reason.startswith("moe_topk is empty")


def test_what_is_assumed_is_listed() -> None:
    silent = {"vocab": None, "n_heads": None, "micro_batch": None, "activation_ckpt": None}
    run = measured_run(row(**silent))
    assert run.is_supported
    assert {"vocab=50304", "n_heads=32", "micro_batch=1", "activation_ckpt=none"} <= set(run.assumed)
    assert measured_run(row()).assumed == ()


def test_a_row_says_what_to_assume_where_its_source_is_silent() -> None:
    silent = {**PIPELINE, "vpp": None, "vocab": None, "micro_batch": None, "activation_ckpt": None}
    run = measured_run(row(silent, assume="vpp=2; vocab=128256; micro_batch=2; activation_ckpt=full"))
    assert set(run.assumed) >= {"vpp=2", "vocab=128256", "micro_batch=2", "activation_ckpt=full"}
    assert run.layout is not None
    assert (run.layout.stages_per_rank, run.layout.microbatch_size) == (2, 2)
    assert run.layout.activation_checkpoint == "full"
    # What the row itself states is not overruled.
    assert measured_run(row(assume="vocab=7; micro_batch=4")).assumed == ()


def test_a_prediction_module_is_one_more_block_and_head() -> None:
    plain, with_module = (measured_run(row(LATENT, **more)).setup for more in ({}, {"mtp_modules": 1}))
    assert plain is not None
    assert with_module is not None
    assert with_module.model.num_parameters > plain.model.num_parameters


def test_stated_batches_make_the_microbatches() -> None:
    run = measured_run(row(micro_batch=None, grad_accum=2))
    assert run.layout is not None
    assert run.layout.microbatch_size == 128 // (32 * 2)
    assert not any("micro_batch" in one for one in run.assumed)
    without_batch = measured_run(row(global_batch=None, dp=32, grad_accum=4))
    assert without_batch.setup is not None
    assert without_batch.setup.workload.global_batch_size == 128


def lines(newline: str = "\n", **cells: Any) -> str:
    of = row(**cells)
    return newline.join([",".join(of), ",".join(f'"{value}"' for value in of.values()), ""])


def read(tmp_path: Path, text: str | bytes) -> list[MeasuredRun]:
    file = tmp_path / "runs.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_runs(file)


def test_line_ends_and_spaces_do_not_matter(tmp_path: Path) -> None:
    unix, windows = (read(tmp_path, lines(newline)) for newline in ("\n", "\r\n"))
    assert unix == windows
    assert unix[0].row.measured_s == 2.5
    spaced = measured_run({name: f" {cell} " for name, cell in DENSE.items()})
    assert (spaced.setup, spaced.layout) == (unix[0].setup, unix[0].layout)


def test_short_and_long_rows_are_read(tmp_path: Path) -> None:
    header, first, _ = lines().split("\n")
    whole, long, short = read(tmp_path, "\n".join([header, first, first + ",more,and more", '"short"', ""]))
    assert whole.setup == long.setup
    assert "is empty: it is required" in short.unsupported_reason


def test_columns_that_nobody_knows_are_left_alone(tmp_path: Path) -> None:
    header, first, _ = lines().split("\n")
    (run,) = read(tmp_path, f"{header},weather\n{first},rain\n")
    assert run.is_supported


def test_a_file_without_what_every_run_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no column n_layers, gpu, n_gpus: add it"):
        read(tmp_path, "id,hidden\na,1\n")
    with pytest.raises(ConfigError, match="has no column id"):
        read(tmp_path, "")
    with pytest.raises(ConfigError, match="cannot be read as CSV"):
        read(tmp_path, b"\xff\xfe\x00id")
    with pytest.raises(ConfigError, match="cannot be read as CSV"):
        read_runs(tmp_path / "nowhere.csv")


def test_latent_attention_and_shared_experts_are_those_of_the_model() -> None:
    run = measured_run(row(LATENT, n_layers=61, ffn_hidden=18432, vocab=129280, stack="megatron-core-2026"))
    assert run.setup is not None
    # DeepSeek-V3 as its report counts it, without the module that predicts a further token: 671 billion.
    assert run.setup.model.num_parameters == pytest.approx(671.0e9, rel=2e-3)
