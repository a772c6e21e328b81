"""Table of a chaos run: one row for each fault, and the verdict in words."""

from meshwright.pages.tables.page_table import PageTable
from meshwright.spec.fault import NUMBER_FAULTS, Fault
from meshwright.spec.run.chaos_report import ChaosReport, FaultOutcome
from meshwright.units import counted, format_duration

_HASH_DIGITS = 16


def chaos_table(report: ChaosReport) -> PageTable:
    """Return what each fault did."""
    has_others = report.job.replicas.independent
    ended = ("replica ended#", "others' next step#") if has_others else (detection_column(report),)
    table = PageTable("fault", "rank#", "step#", "phase", *ended, "next step#", "steps again#")
    for one in report.outcomes:
        is_missed = one.injection is None and not one.was_away
        table.add_row(*_row(one, has_others=has_others), style="bold red" if is_missed else None)
    return table


def detection_column(report: ChaosReport) -> str:
    """Return what the column of detections is called: no rank ends for a wrong number, which a check finds."""
    is_found = {one.fault.kind in NUMBER_FAULTS for one in report.outcomes}
    return "all ended or found#" if len(is_found) > 1 else "found after#" if True in is_found else "all ended#"


def _row(one: FaultOutcome, *, has_others: bool) -> list[str]:
    fault = one.fault
    kind = fault_words(fault)
    step = "any" if fault.step is None else str(fault.step)
    where = [kind, str(fault.rank), step, fault.phase or ""]
    if one.injection is None:
        return [*where, "was away" if one.was_away else "never came", *("",) * (3 if has_others else 2)]
    others = (one.others_after_s,) if has_others else ()
    after = (one.detected_after_s, *others, one.recovered_after_s)
    times = ["-" if seconds is None else format_duration(seconds) for seconds in after]
    return [*where, *times, "-" if one.lost_steps is None else str(one.lost_steps)]


def fault_words(fault: Fault) -> str:
    """Return the kind of an injected fault, with its argument."""
    if fault.kind == "slow-rank":
        return f"{fault.kind} {fault.argument:g}x"
    if fault.kind == "slow-disk":
        return f"{fault.kind} {fault.argument:g} s"
    return f"{fault.kind} at call {fault.argument:g}" if fault.is_of_disk and fault.argument else fault.kind


def chaos_notes(report: ChaosReport) -> list[str]:
    """Return the verdict, one sentence a line."""
    lines = [f"{problem[0].upper()}{problem[1:]}." for problem in report.problems]
    if report.holds:
        lines.append(
            f"Survived: final parameters {report.expected_hash[:_HASH_DIGITS]} with and without faults, each step of "
            "the same samples."
        )
    lines.append(
        f"{counted(len(report.outcomes), 'fault')} on {counted(report.num_ranks, 'rank')}, "
        f"{counted(report.num_attempts, 'attempt')}: {format_duration(report.disturbed_s)}, without faults "
        f"{format_duration(report.undisturbed_s)}. Times are from the fault on."
    )
    if num_away := sum(one.was_away for one in report.outcomes):
        lines.append(
            f"{counted(num_away, 'fault')} befell no rank: its replica, lost before, was not back for that step."
        )
    if report.num_repairs:
        lines.append(
            f"Resumed {counted(report.num_repairs, 'time')} after exit code 70, as a person does who repaired the disk."
        )
    if report.smallest is not None:
        few = "; ".join(map(str, report.smallest))
        lines.append(f"Fewest faults that make it fail: {few}.")
    return lines
