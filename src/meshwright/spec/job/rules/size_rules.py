"""What tensor, context and expert parallelism ask of a model's sizes."""

import math
from collections.abc import Iterable, Iterator

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.gpt2_architecture import GPT2Architecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.problem import Fix, Problem, nearest_first

_MAX_SUGGESTED = 4096
"""Divisors are looked for up to here: few axes have as many ranks."""


def tensor_problems(layout: Layout, architecture: LlamaArchitecture, seq_len: int) -> Iterator[Problem]:
    """Yield why layout.tp cannot split the model's matmuls; what it suggests splits the sequences too."""
    tp, sizes = layout.tp, sizes_over_tp(architecture)
    common = math.gcd(*sizes.values(), seq_len // layout.cp or 1)
    allowed = [n for n in divisors(common) if _shares_kv_heads(architecture, n)]
    fixes = [{"layout.tp": number} for number in nearest_first(tp, allowed)]
    if undivided := [f"{name} = {size}" for name, size in sizes.items() if size % tp]:
        yield Problem(f"layout.tp = {tp} does not divide the model's {both(undivided)}", fixes)
    elif not _shares_kv_heads(architecture, tp):
        yield Problem(
            f"layout.tp = {tp} neither divides the model's num_kv_heads = {architecture.num_kv_heads} nor is a "
            f"multiple of it that divides num_kv_heads x head_dim = {architecture.kv_dim}",
            fixes,
        )


def head_exchange_problems(layout: Layout, architecture: LlamaArchitecture) -> Iterator[Problem]:
    """Yield why Ulysses cannot swap heads for sequence; nothing where tp does not split the heads to begin with."""
    cp, tp = layout.cp, layout.tp
    if layout.cp_method != "ulysses" or architecture.num_heads % tp or not _shares_kv_heads(architecture, tp):
        return
    heads, kv_heads = architecture.num_heads // tp, max(1, architecture.num_kv_heads // tp)
    allowed = [n for n in divisors(heads) if n % kv_heads == 0 or kv_heads % n == 0]
    if cp not in allowed:
        each = f" that layout.tp = {tp} leaves each rank" if tp > 1 else ""
        fixes: list[Fix] = [{"layout.cp": number} for number in nearest_first(cp, allowed)]
        yield Problem(
            f'layout.cp = {cp} with layout.cp_method = "ulysses" must divide the num_heads = {heads}{each}, and divide '
            f"the num_kv_heads = {kv_heads} or be a multiple of it",
            [*fixes, {"layout.cp_method": "all-gather"}],
        )


def ring_problems(layout: Layout, architecture: LlamaArchitecture) -> Iterator[Problem]:
    """Yield why a ring cannot compute the model's attention."""
    if layout.cp > 1 and layout.cp_method == "ring" and (asked := ring_obstacles(architecture)):
        others: list[Fix] = [{"layout.cp_method": method} for method in ("all-gather", "ulysses")]
        yield Problem(f'layout.cp_method = "ring" does not compute the model\'s {both(asked)}', others)


def ring_obstacles(architecture: LlamaArchitecture) -> list[str]:
    """Return what the model's attention has that ring attention does not compute."""
    windows = {architecture.window_of(layer) for layer in range(architecture.num_layers)} - {None}
    sinks = ["attention sinks"] if architecture.has_sinks_and_output_bias else []
    return sinks + [f"sliding_window = {window}" for window in windows]


def expert_problems(
    layout: Layout, architecture: LlamaArchitecture | None, *, knows_tp: bool = True
) -> Iterator[Problem]:
    """Yield why layout.ep and layout.etp cannot split experts; of a model that is None, the ranks' part of it.

    Without `knows_tp`, tp is wrong itself: what follows from its value is left out.
    """
    if isinstance(architecture, LlamaArchitecture) and not isinstance(architecture, MoEArchitecture):
        for axis in ("ep", "etp"):
            if (degree := getattr(layout, axis)) > 1:
                what = f"layout.{axis} = {degree} splits experts, but the model is dense"
                yield Problem(what, [{f"layout.{axis}": 1}])
        return
    if knows_tp and layout.etp not in (1, layout.tp):
        divides = architecture is None or architecture.expert_ffn_dim % layout.tp == 0
        yield Problem(
            f"layout.etp = {layout.etp} is neither 1 nor layout.tp = {layout.tp}",
            [{"layout.etp": degree} for degree in sorted({1, layout.tp if divides else 1})],
        )
        return
    num_ranks, what = _ranks_of_experts(layout)
    allowed = divisors(num_ranks if architecture is None else math.gcd(num_ranks, architecture.num_experts))
    undivided = [f"{what} = {num_ranks}"] if knows_tp and num_ranks % layout.ep else []
    if architecture is not None and architecture.num_experts % layout.ep:
        undivided.append(f"the model's num_experts = {architecture.num_experts}")
    if undivided:
        fixes = [{"layout.ep": degree} for degree in nearest_first(layout.ep, allowed)]
        yield Problem(f"layout.ep = {layout.ep} does not divide {both(undivided)}", fixes)
    if architecture is not None and architecture.expert_ffn_dim % layout.etp:
        yield Problem(
            f"layout.etp = {layout.etp} does not divide the model's expert_ffn_dim = {architecture.expert_ffn_dim}",
            [{"layout.etp": 1}],
        )


def both(values: Iterable[object]) -> str:
    """Return values that all count: "a = 2 and b = 3"."""
    return " and ".join(map(str, values))


def divisors(value: int) -> list[int]:
    """Return the divisors of `value`, ascending, up to the largest degree of an axis."""
    return [n for n in range(1, min(value, _MAX_SUGGESTED) + 1) if value % n == 0]


def sizes_over_tp(architecture: LlamaArchitecture) -> dict[str, int]:
    """Return by name what tensor parallelism splits into equal parts."""
    sizes = {"num_heads": architecture.num_heads, "vocab_size": architecture.vocab_size}
    if not isinstance(architecture, MoEArchitecture) or architecture.num_dense_layers:
        sizes["ffn_dim"] = architecture.ffn_dim
    if isinstance(architecture, MoEArchitecture) and architecture.num_shared_experts:
        sizes["num_shared_experts x expert_ffn_dim"] = architecture.shared_ffn_dim
    if isinstance(architecture, GPT2Architecture):
        sizes["max_seq_len"] = architecture.max_seq_len
    return sizes


def _shares_kv_heads(architecture: LlamaArchitecture, tp: int) -> bool:
    """Return whether each of `tp` ranks holds whole key heads, or an equal part of one that it shares with others."""
    if architecture.num_kv_heads % tp == 0:
        return True
    return tp % architecture.num_kv_heads == 0 and architecture.kv_dim % tp == 0


def _ranks_of_experts(layout: Layout) -> tuple[int, str]:
    """Return among how many ranks ep is carved out, and their name."""
    if layout.etp > 1:
        return layout.fsdp, "layout.dp_shard x cp"
    return layout.fsdp * layout.tp, "layout.dp_shard x cp x tp"


def length_problems(architecture: LlamaArchitecture, seq_len: int) -> list[Problem]:
    """Return why sequences of `seq_len` tokens are too long for a model with learned positions."""
    if isinstance(architecture, GPT2Architecture) and seq_len > architecture.max_seq_len:
        what = (
            f"train.seq_len = {seq_len} is longer than the model's max_seq_len = {architecture.max_seq_len}, the rows "
            "of its position embedding"
        )
        return [Problem(what, _shorter(architecture.max_seq_len), after=" or less", most=1)]
    return []


def _shorter(most: int) -> list[Fix]:
    """Return lengths of sequences from `most` down: its even parts, which more layouts divide."""
    return [{"train.seq_len": most >> power} for power in range(most.bit_length())]
