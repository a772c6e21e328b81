"""Meshwright as a library: plan a model on a cluster, read and draw the plan, simulate a tiny job.

    python examples/use_as_a_library.py [FOLDER]

writes plan.html into FOLDER (default: the current one), and plan.csv where pandas is installed. It needs the extras
train and report.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import meshwright as mw

TINY = Path(__file__).with_name("tiny.toml")


def main(folder: Path) -> None:
    plan = mw.plan(model="llama3-8b", cluster="h100:64", seq_len=8192, global_batch_tokens="4M")
    print(repr(plan))

    # Every figure of the page is a field.
    estimate = plan.pick.estimate
    print(
        f"dp_shard {plan.layout.dp_shard}, tp {plan.layout.tp}, {plan.tokens_per_s_per_device:,.0f} tokens/s a device"
    )
    print(f"exposed data-parallel communication: {estimate.step.dp_communication_s:.3f} s of {plan.step_s:.3f} s")
    for other in plan.runners_up[:3]:
        change = other.estimate.step.total_s / plan.step_s - 1
        print(f"dp_shard {other.layout.dp_shard}, tp {other.layout.tp}, pp {other.layout.pp}: {change:+.1%}")

    # What `meshwright plan` prints, the same as a page, a figure and a data frame.
    print(plan.table(width=100))
    plan.to_html(folder / "plan.html")
    figure = plan.plot("pareto")
    print(f"plots {plan.plots}; this one has {len(figure.data)} traces")
    if find_spec("pandas"):
        frame = plan.to_pandas()
        frame.to_csv(folder / "plan.csv", index=False)
        print(frame[["role", "tp", "pp", "step_s", "mfu"]].head())

    # The trainer's own step on four fake ranks, without a device.
    simulation = mw.simulate(TINY, cluster="h100:4")
    print(repr(simulation))
    print(f"fits: {simulation.fits}; exposed communication {simulation.run.outcome.parts.exposed_s:.2g} s")
    print(repr(simulation.timeline))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
