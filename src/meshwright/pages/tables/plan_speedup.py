"""What would make a plan's step shorter: keys that the search left alone, memory, lower precision."""

from collections.abc import Iterator, Mapping

from rich.markup import escape

from meshwright.pages.tables.page_table import percent
from meshwright.spec.run.layout_plan import Plan
from meshwright.units import format_bytes

_LEAST_GAIN = 0.001


def unsearched_words(plan: Plan) -> Iterator[str]:
    """Yield which keys were not searched, where memory keeps a faster layout out, and which beat the fastest."""
    if not plan.not_searched or not any(map(plan.is_faster, _kept_out_s(plan).values())):
        return
    yield f"not searched, and may be faster as they save memory: {', '.join(plan.not_searched)}"
    faster = {name: step_s for name, step_s in _unsearched_s(plan).items() if plan.is_faster(step_s)}
    if faster:
        best = min(faster, key=lambda name: faster[name])
        gain = percent(1 - faster[best] / plan.pick.step_s)
        yield f"faster than every layout searched: {escape(best)}: predicted {gain} faster than the pick, see below"


def largest_speedup(plan: Plan) -> str:
    """Return the largest speedup among the changes that the planner may not make by itself.

    Where that needs memory that the device lacks, the largest that does not follows.
    """
    pick_s = plan.pick.step_s
    settable = {f"{one.change} ({one.note})": one.best.step_s / pick_s for one in plan.what_ifs if one.is_runnable}
    settable |= {name: step_s / pick_s for name, step_s in _fixed_s(plan).items()}
    if plan.given is not None and plan.given.fits:
        settable["the pick in place of your layout"] = pick_s / plan.given.step_s
    missing = {f"memory for {name}": step_s / pick_s for name, step_s in _kept_out_s(plan).items()}
    best = _largest(settable | missing)
    if best is None:
        return f"Largest potential speedup: none; no alternative evaluated for {plan.stack} shortens the step."
    name, words = best
    without = _largest(settable) if name in missing else None
    return f"Largest potential speedup: {words} of the step." + (
        f" Without more memory: {without[1]}." if without is not None else ""
    )


def _largest(shares: Mapping[str, float]) -> tuple[str, str] | None:
    """Return the name of the least share of the step that is left, and the words on it; None where none is shorter."""
    name = min(shares, key=lambda name: shares[name], default=None)
    if name is None or shares[name] > 1 - _LEAST_GAIN:
        return None
    return name, f"{escape(name)}: saves {percent(1 - shares[name])}"


def _kept_out_s(plan: Plan) -> dict[str, float]:
    """Return the steps of layouts that cannot be used, by their change from the pick and the reason."""
    steps = {f"{one.change} ({one.reason})": one.step_s for one in plan.rejections if one.step_s is not None}
    alone = plan.fsdp_alone
    if alone is not None and alone.headroom_bytes < 0:
        steps[f"FSDP alone ({format_bytes(-alone.headroom_bytes)} are missing)"] = alone.step_s
    return steps


def _fixed_s(plan: Plan) -> dict[str, float]:
    """Return the steps of layouts that fit with another key changed, too."""
    return {f"{one.change}, {fix.change}": fix.step_s for one in plan.rejections for fix in one.fixes}


def _unsearched_s(plan: Plan) -> dict[str, float]:
    """Return the steps of what was priced with a key that was not searched."""
    steps = _fixed_s(plan) | {one.change: one.best.step_s for one in plan.what_ifs}
    return {name: step_s for name, step_s in steps.items() if any(f"{key}=" in name for key in plan.not_searched)}
