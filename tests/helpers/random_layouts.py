"""Hypothesis strategies for a tiny job under any layout of a few ranks, and the proof that the layout trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from meshwright.prover.differences import TOLERANCES, assemble, compare
from meshwright.prover.record import record
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import SCHEDULES, SPLIT_BACKWARD_SCHEDULES, Layout, LayoutRequest
from meshwright.spec.run.proof import LayoutProof
from meshwright.trainer.launch.local.local_ranks import run_ranks

Case = tuple[Job, Layout]


def some(*values: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for one of `values`, the simplest first; repeat one to draw it more often."""
    return st.sampled_from(values)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a job of a tiny model, and a layout for it; most fit together, some do not."""
    layout = draw(layouts())
    # Where nothing is rounded, most layouts do not fit, but what fits is odd.
    is_rounded = draw(some(True, True, True, False))
    options = draw(dense_options(layout, is_rounded))
    source = draw(some("llama-1m", "llama-1m", "moe-4m", "mla-moe-4m"))
    if source != "llama-1m" or layout.ep * layout.etp > 1:
        source = "moe-4m" if source == "llama-1m" else source
        options |= draw(mixture_options(layout, is_rounded, options))
    if source == "mla-moe-4m":
        options |= draw(latent_options(options))
    if layout.pp > 1 and draw(st.booleans()):
        # Also without a block for the first or the last stage.
        cuts = draw(st.permutations(range(options["num_layers"] + 1)))[: layout.num_stages - 1]
        layout = layout.replace(stage_boundaries=tuple(sorted(cuts)))
    return draw(jobs(layout, source, options, is_rounded)), layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw a layout of 8 ranks or fewer."""
    degrees: dict[str, int] = {}
    for factor in draw(some([2], [2, 2], [3], [3, 2], [5], [2, 2, 2], [2, 2, 2])):
        axis = draw(some("dp_shard", "tp", "cp", "pp", "dp_replicate"))
        degrees[axis] = degrees.get(axis, 1) * factor
    tp, fsdp = degrees.get("tp", 1), degrees.get("dp_shard", 1) * degrees.get("cp", 1)
    kept = draw(some("auto", "always", "never", 2 if 2 < fsdp == math.prod(degrees.values()) else "auto"))
    degrees["etp"] = draw(some(1, 1, tp))
    degrees["ep"] = draw(some(1, 1, fsdp, fsdp * (tp if degrees["etp"] == 1 else 1), 2))
    recompute = draw(some("none", "full", "selective"))
    schedule = draw(some(*SCHEDULES))
    is_deep = degrees.get("pp", 1) > 1
    return Layout(
        **degrees,
        microbatch_size=draw(some(1, 2)),
        schedule=schedule if is_deep else "1F1B",
        virtual_stages=draw(some(None, None, 3)) if is_deep and schedule not in ("GPipe", "1F1B") else None,
        cp_method=draw(some("all-gather", "ring", "ulysses")),
        activation_checkpoint=recompute,
        activation_checkpoint_every=1 if recompute == "none" else draw(some(1, 2)),
        reshard_after_forward="auto" if is_deep and schedule in SPLIT_BACKWARD_SCHEDULES else kept,
        gradient_sync=draw(some("auto", "step", "microbatch")),
        prefetch=draw(some(1, 0, 2)),
        separate_reduce_group=draw(some(False, False, True)),
        communication_sms=draw(some(None, None, 4)),
        cpu_offload=draw(some(False, False, True)),
        # Compiling takes seconds, as long as all the rest.
        compile=draw(some(*[False] * 5, True)),
        compile_loss=draw(some(*[False] * 5, True)),
        compile_optimizer=draw(some(*[False] * 5, True)),
        compile_backend="aot_eager",
    )


@st.composite
def dense_options(draw: st.DrawFn, layout: Layout, is_rounded: bool) -> dict[str, Any]:
    """Draw the sizes of a dense model; if they are rounded, `layout.tp` and as a rule the stages fit."""
    tp = layout.tp if is_rounded else 1
    kv_heads = draw(some(2, 1, 3, 4))
    heads = math.lcm(kv_heads, tp) * draw(some(1, 2, 3))
    if is_rounded and kv_heads % tp and tp % kv_heads:
        kv_heads = tp
    num_layers = draw(st.integers(1, 4)) if not is_rounded else max(1, layout.num_stages - draw(some(0, 1, 2)))
    return {
        "vocab_size": up_to(draw(st.integers(257, 290)), tp),
        "dim": draw(some(16, 20, 24)),
        "num_layers": num_layers + draw(some(0, 1)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": draw(some(4, 8, 6)) if not is_rounded else 2 * tp,
        "ffn_dim": up_to(draw(some(24, 36, 42)), tp),
        "tie_embeddings": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
    }


@st.composite
def mixture_options(draw: st.DrawFn, layout: Layout, is_rounded: bool, dense: dict[str, Any]) -> dict[str, Any]:
    """Draw what a mixture of experts has besides `dense`."""
    num_groups = draw(some(1, 2))
    num_experts = up_to(draw(some(4, 6, 10)), math.lcm(num_groups, layout.ep if is_rounded else 1))
    return {
        "num_experts": num_experts,
        "experts_per_token": draw(st.integers(1, num_experts // num_groups)),
        "expert_ffn_dim": up_to(draw(some(8, 10, 15)), layout.tp if is_rounded else 1),
        "num_shared_experts": draw(some(0, 1, 2)),
        "num_dense_layers": draw(st.integers(0, dense["num_layers"])),
        "router": {
            "score": draw(some("softmax", "sigmoid")),
            "normalize_weights": draw(st.booleans()),
            "num_groups": num_groups,
            "groups_per_token": 1,
            "bias_update_rate": draw(some(0.0, 0.01)),
            "balance_loss": draw(some(0.0, 0.01)),
            "z_loss": draw(some(0.0, 0.01)),
        },
    }


@st.composite
def latent_options(draw: st.DrawFn, dense: dict[str, Any]) -> dict[str, Any]:
    """Draw latent attention for a model of `dense` sizes."""
    latent = {
        "query_rank": draw(some(12, 10)),
        "kv_rank": draw(some(8, 6)),
        "plain_head_dim": draw(some(4, 6)),
        "rope_head_dim": draw(some(2, 4)),
        "value_head_dim": draw(some(4, 6, 3)),
    }
    head_dim = latent["plain_head_dim"] + latent["rope_head_dim"]
    return {"latent": latent, "num_kv_heads": dense["num_heads"], "head_dim": head_dim, "qk_norm": False}


@st.composite
def jobs(draw: st.DrawFn, layout: Layout, source: str, options: dict[str, Any], is_rounded: bool) -> Job:
    """Draw the rest of a job in float64: batch, sequences, documents."""
    num_microbatches = draw(st.integers(1, 5))
    if is_rounded and layout.pp > 1:
        num_microbatches = layout.num_stages + layout.pp * draw(some(0, 1))
    seq_len = up_to(draw(some(16, 24, 30, 9)), 2 * layout.cp * layout.tp if is_rounded else 1)
    return Job.from_dict(
        {
            "model": {"source": source, "options": options},
            "data": {"mask_documents": draw(st.booleans()), "validation_fraction": 0.0},
            "train": {
                "steps": 2,
                "seq_len": seq_len,
                "global_batch_size": layout.dp * layout.microbatch_size * num_microbatches,
                "seed": draw(st.integers(0, 9)),
            },
            # As the prover has it: a usual eps makes of rounding in a gradient of zero a step like any other.
            "optimizer": {"eps": 1e-2, "learning_rate": 1e-2, "warmup_steps": 0, "max_grad_norm": 0.5},
            "precision": {"compute": "float64"},
        }
    )


def up_to(value: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is `value` or more."""
    return -(-value // divisor) * divisor


def train_both(job: Job, layout: Layout, folder: Path, *, repeat: bool = False) -> LayoutProof:
    """Return how `layout` compares with one process in training `job`, as it is, in float64."""
    corpus = folder / "sums.txt"
    if not corpus.exists():
        corpus.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(3000)))
    job = job.replace(data=job.data.replace(source=str(corpus), cache_dir=str(folder / "cache")))
    shared = job.replace(layout=LayoutRequest(**layout.to_dict()))
    [(alone, _)] = run_ranks(record, 1, job, "cpu", None, False)
    answers = run_ranks(record, layout.num_ranks, shared, "cpu", None, repeat, timeout_s=110)
    whole = assemble([one for one, _ in answers])
    return LayoutProof(
        layout=layout,
        differences=compare(whole, assemble([alone]), TOLERANCES["float64"]),
        problem="; ".join(whole.unequal_copies) or None,
        repeats=all(is_equal for _, is_equal in answers) if repeat else None,
        took_s=0.0,
    )
