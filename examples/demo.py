"""`make demo`: the story of one job: planned, checked, simulated, proven, trained, killed, resumed, exported, reported.

Each act shows the `meshwright` command that it runs and one line of proof. Everything lands in .demo/. DEMO=full also
plans and simulates Llama 3 405B on 16,384 GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.table import Table
from rich.tree import Tree

from meshwright.errors import ExitCode
from meshwright.hardware.catalogue import CATALOGUE_VARIABLE
from meshwright.spec.run.run import Manifest, Run
from meshwright.units import format_bytes, format_duration

ROOT = Path(__file__).resolve().parent.parent
DEMO = Path(".demo")
JOB, REPORT = DEMO / "job.toml", DEMO / "report.html"
STRAIGHT, KILLED, EXPORTED = Run(DEMO / "straight"), Run(DEMO / "killed"), DEMO / "hugging-face"
# What calibrate measures stays in .demo/ too.
CATALOGUE = DEMO / "catalogue"
STEPS = 30
AIM_PERCENT = 15
CLUSTER = """
[cluster]
# This machine, as `meshwright calibrate` measures it.
name = "cpu-local"
num_devices = 2
"""

TRAIN = f"train {JOB} run.dir="
COMMANDS = {
    "plan a cluster": "plan --model llama3-70b --cluster h100:1024 --seq-len 8192 --global-batch-tokens 4M",
    "calibrate": "calibrate --device cpu --ranks 2 --seconds 5",
    "plan": f"plan {JOB} --write",
    "check": f"check {JOB}",
    "simulate": f"simulate {JOB}",
    "prove": f"prove {JOB} dp_shard=2,tp=2 --exact",
    "train": f"{TRAIN}{STRAIGHT.folder}",
    "train and kill": f"{TRAIN}{KILLED.folder}",
    "resume": f"{TRAIN}{KILLED.folder} --resume",
    "export": f"export {KILLED.folder} {EXPORTED} --verify",
    "generate": f'generate {KILLED.folder} --prompt "def " --max-new-tokens 120 --temperature 0.5 --seed 1',
    "report": f"report {STRAIGHT.folder} --simulate --html {REPORT}",
}
FULL = {
    "plan 16,384 GPUs": "plan examples/llama3-405b-16k.toml",
    "simulate 16,384 GPUs": "simulate examples/llama3-405b-16k.toml",
}
NEXT = ("prove examples/tiny-moe.toml dp_shard=2,tp=2,ep=4", "simulate examples/llama3-70b.toml", "init llama3-8b")

# A rank is killed this many steps after the first checkpoint, so that there is something to lose.
STEPS_TO_LOSE = 5
LOST_PEER_TIMEOUT_S = 120
COMMAND_TIMEOUT_S = 300

console = Console(highlight=False)


class DemoFailedError(Exception):
    """An act did not show what it is there to show."""


def main() -> None:
    """Run the acts in order; exit 1 at the first that fails."""
    os.chdir(ROOT)
    shutil.rmtree(DEMO, ignore_errors=True)
    CATALOGUE.mkdir(parents=True)
    text = (ROOT / "examples" / "tiny.toml").read_text(encoding="utf-8")
    JOB.write_text(text.replace("steps = 60", f"steps = {STEPS}") + CLUSTER, encoding="utf-8")
    acts = (*ACTS, *FULL_ACTS) if os.environ.get("DEMO") == "full" else ACTS
    os.environ[CATALOGUE_VARIABLE] = str(CATALOGUE)
    started_s = time.perf_counter()
    measured: dict[str, str] = {}
    try:
        for number, act in enumerate(acts, start=1):
            console.print(f"\n[bold]{number}. {act.__doc__}[/bold]")
            act(measured)
    except DemoFailedError as failure:
        console.print(f"[bold red]✗[/bold red] {failure}", soft_wrap=True)
        sys.exit(1)
    measured["the whole demo"] = format_duration(time.perf_counter() - started_s)
    closing_card(measured)


def plan_a_cluster(measured: dict[str, str]) -> None:
    """Plan Llama 3 70B on 1,024 H100 without owning them"""
    started_s = time.perf_counter()
    output = run("plan a cluster")
    took = format_duration(time.perf_counter() - started_s)
    quote(output[: output.index("memory by class")])
    scored = re.search(r"([\d,]+) layouts scored", output)
    mfu = re.search(r"MFU +HFU[^\n]*\n.*?([\d.]+ %) +[\d.]+ % ", output)
    if scored is None or mfu is None:
        raise DemoFailedError(f"the plan has no layout: {files_of('plan a cluster')}")
    claim(f"{scored[1]} layouts scored in {took}: {mfu[1]} MFU expected of the pick")


def calibrate(measured: dict[str, str]) -> None:
    """Measure this machine, so that the next figures are about it"""
    quote(run("calibrate"))
    claim("plans and simulations of a job on cpu-local now use these figures")


def plan(measured: dict[str, str]) -> None:
    """Plan a job of this machine: a million-parameter Llama on 2 processes"""
    output = run("plan")
    quote(output[: output.index("memory by class")])
    measured["layout"] = next(line for line in output.splitlines() if re.match(r"(dp|pp|tp|cp|micro)\w*=", line))
    claim(f"written into {JOB}: {measured['layout']}")


def check(measured: dict[str, str]) -> None:
    """Check the job before any process starts"""
    quote(run("check"))
    claim("what is wrong would be listed here, with the key to change")


def simulate(measured: dict[str, str]) -> None:
    """Simulate that very layout: trace the real program, and execute the trace"""
    output = run("simulate")
    quote(output[: output.index(" at its peak")].rpartition("\n")[0])
    step = re.search(r"^step +([\d.]+ m?s) +100 %", output, re.MULTILINE)
    if step is None:
        raise DemoFailedError(f"the simulation has no step: {files_of('simulate')}")
    measured["step, simulated"] = step[1]
    claim(f"{step[1]} a step, and no deadlock")


def prove(measured: dict[str, str]) -> None:
    """Prove that FSDP x TP on 4 processes computes what one process does, in float64"""
    output = run("prove")
    quote(output)
    bars = re.findall(
        r"\d\.\de-\d\d|equal", next(line for line in output.splitlines() if line.startswith("dp_shard=2"))
    )
    expect(len(bars) == 3, "the table has no differences", "prove")
    measured["FSDP x TP against one process"] = f"loss {bars[0]}, gradients {bars[1]}, weights {bars[2]}"
    claim(f"{measured['FSDP x TP against one process']}: rounding, and nothing else")


def train(measured: dict[str, str]) -> None:
    """Train on the source code of Python's standard library, on 2 processes"""
    with start("train") as process:
        follow(process, STRAIGHT, until=lambda rows: False)
    expect(process.returncode == ExitCode.DONE, f"training ended with exit code {process.returncode}", "train")
    losses = [row["loss"] for row in rows_of(STRAIGHT)]
    results = manifest_of(STRAIGHT).results
    measured["loss"] = f"{losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}"
    measured["step, measured (median)"] = f"{results['median_step_ms']:.0f} ms"
    console.print(f"  [cyan]{sparkline(losses)}[/cyan]")
    expect(losses[-1] < 0.6 * losses[0], f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f} only", "train")
    claim(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps; this is the run that is never killed")


def kill(measured: dict[str, str]) -> None:
    """The same job again, with one of its processes killed in mid-step"""
    with start("train and kill") as process:
        follow(process, KILLED, until=lambda rows: has_more_than_a_checkpoint(rows))
        expect(process.poll() is None, "training ended before a process could be killed", "train and kill")
        rows = rows_of(KILLED)
        # Half a step after the last one that is known to be done.
        time.sleep(statistics.median(row["step_ms"] for row in rows) / 2e3)
        pids = manifest_of(KILLED).attempts[-1].pids
        os.kill(pids[1], signal.SIGKILL)
        console.print(f"  [red]kill -9 {pids[1]}[/red]  (rank 1, in step {rows[-1]['step'] + 1})")
        with Status("waiting for the others to notice", console=console):
            wait(process, LOST_PEER_TIMEOUT_S, "train and kill")
    left = [pid for pid in (*pids, process.pid) if is_alive(pid)]
    expect(process.returncode == ExitCode.RETRY, f"exit code {process.returncode}, not 75", "train and kill")
    expect(not left, f"processes {left} are still there", "train and kill")
    claim("the command ended with exit code 75, retry, and left no process behind")


def resume(measured: dict[str, str]) -> None:
    """Resume, and compare with the run that was never killed"""
    newest = KILLED.checkpoint_steps()[-1]
    with start("resume") as process:
        follow(process, KILLED, until=lambda rows: False)
    expect(process.returncode == ExitCode.DONE, f"resuming ended with exit code {process.returncode}", "resume")
    straight, resumed = (str(manifest_of(one).results["parameter_hash"]) for one in (STRAIGHT, KILLED))
    measured["parameters, never killed"], measured["parameters, killed and resumed"] = straight, resumed
    console.print(f"  never killed        {straight}\n  killed and resumed  {resumed}")
    expect(straight == resumed, "the parameters differ", "resume")
    losses = [{row["step"]: row["loss"] for row in rows_of(one)} for one in (STRAIGHT, KILLED)]
    expect(losses[0] == losses[1], "the losses differ", "resume")
    claim(f"equal to the last bit, and so is every loss from step {newest + 1} to {max(losses[0])}")


def export(measured: dict[str, str]) -> None:
    """Export to Hugging Face format"""
    output = run("export")
    quote(output)
    difference = re.search(r"within ([0-9.e+-]+)", output)
    if difference is None:
        raise DemoFailedError(f"the export said nothing of logits: {files_of('export')}")
    largest = float(difference[1])
    measured["logits"] = f"at most {largest:g} away from transformers'" if largest else "equal to transformers'"
    claim(f"transformers loads it: logits {measured['logits']}")


def generate(measured: dict[str, str]) -> None:
    """Let it write"""
    text = run("generate")
    quote(text)
    expect(len(text.strip()) > 20, "it wrote next to nothing", "generate")
    claim(f"{len(text.strip())} characters of a million-parameter model's idea of Python")


def report(measured: dict[str, str]) -> None:
    """Compare prediction and measurement, and write a page to look at"""
    output = run("report")
    quote(output)
    difference = re.search(r"differ by (-?[\d.]+ %)", output)
    if difference is None:
        raise DemoFailedError(f"the report compares nothing: {files_of('report')}")
    measured["predicted - measured step"] = difference[1]
    if abs(float(difference[1].split()[0])) <= AIM_PERCENT:
        claim(f"predicted {difference[1]} off the measured step ({AIM_PERCENT} % is the aim)")
    else:
        warn(f"predicted {difference[1]} off the measured step: {AIM_PERCENT} % is the aim on an idle machine")
    console.print(f"  open {REPORT} in a browser")


def plan_full(measured: dict[str, str]) -> None:
    """Plan Llama 3 405B on 16,384 H100, next to the published layout"""
    output = run("plan 16,384 GPUs")
    quote(output[: output.index("memory by class")])
    claim("the layout that Meta published is priced next to the pick")


def simulate_full(measured: dict[str, str]) -> None:
    """Simulate all 16,384 ranks of it"""
    output = run("simulate 16,384 GPUs")
    quote(output[: output.index(" at its peak")].rpartition("\n")[0])
    claim("one trace for each role of a rank, executed for all ranks")


ACTS: Sequence[Callable[[dict[str, str]], None]] = (
    plan_a_cluster,
    calibrate,
    plan,
    check,
    simulate,
    prove,
    train,
    kill,
    resume,
    export,
    generate,
    report,
)
FULL_ACTS = (plan_full, simulate_full)


def closing_card(measured: dict[str, str]) -> None:
    """Show what was measured, the run folder, and what to try next."""
    table = Table.grid(padding=(0, 2))
    for name, value in measured.items():
        table.add_row(name, value)
    console.print()
    console.print(Panel(table, title="measured on this machine", expand=False))
    console.print(folder_tree(KILLED.folder))
    console.print("\n[bold]Next[/bold]")
    for command in NEXT:
        console.print(f"  {program()} {command}")


def run(name: str) -> str:
    """Show and run a command and return what it printed; DemoFailedError unless it went well."""
    with start(name) as process, Status("running", console=console):
        wait(process, COMMAND_TIMEOUT_S, name)
    expect(process.returncode == ExitCode.DONE, f"exit code {process.returncode}", name)
    return output_of(name).read_text()


@contextlib.contextmanager
def start(name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Show a command and start it, its output going to files; it does not outlive the act."""
    console.print(f"[bold green]$[/bold green] meshwright {(COMMANDS | FULL)[name]}", soft_wrap=True)
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', (COMMANDS | FULL)[name])]
    with output_of(name).open("wb") as output, output_of(name).with_suffix(".err").open("wb") as errors:
        # What is quoted here is as wide as this terminal.
        environment = os.environ | {"COLUMNS": str(console.width)}
        process = subprocess.Popen([ROOT / program(), *words], stdout=output, stderr=errors, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def wait(process: subprocess.Popen[bytes], timeout_s: float, name: str) -> None:
    """Wait for the end of a command; DemoFailedError when it does not come in time."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        expect(False, f"it did not end within {timeout_s} s", name)


def program() -> str:
    """Return the path of the command line that belongs to this Python."""
    return os.path.relpath(Path(sys.executable).with_name("meshwright"), ROOT)


def output_of(name: str) -> Path:
    return DEMO / f"{name.replace(' ', '-')}.out"


def files_of(name: str) -> str:
    return f"what the command said is in {output_of(name)} and {output_of(name).with_suffix('.err').name}"


def follow(process: subprocess.Popen[bytes], run: Run, until: Callable[[list[dict[str, float]]], bool]) -> None:
    """Show the loss of a run as it falls, to its end or to where `until` its rows is true."""
    with Status("starting", console=console) as status:
        while process.poll() is None:
            rows = rows_of(run)
            if rows:
                losses = [row["loss"] for row in rows]
                status.update(f"step {rows[-1]['step']}  loss {losses[-1]:.3f}  [cyan]{sparkline(losses)}[/cyan]")
            if until(rows):
                return
            time.sleep(0.05)


def has_more_than_a_checkpoint(rows: list[dict[str, float]]) -> bool:
    steps = KILLED.checkpoint_steps()
    return bool(steps and rows) and rows[-1]["step"] >= steps[0] + STEPS_TO_LOSE


def rows_of(run: Run) -> list[dict[str, float]]:
    """Return the metrics of the steps so far; the last line may be half written."""
    lines = run.metrics.read_text().split("\n")[:-1] if run.metrics.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def manifest_of(run: Run) -> Manifest:
    return Manifest.from_json(run.manifest.read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return the values as a row of at most `width` bars."""
    bars = "▁▂▃▄▅▆▇█"
    shown = [values[index * len(values) // min(width, len(values))] for index in range(min(width, len(values)))]
    low, high = min(shown), max(shown)
    return "".join(bars[round((value - low) / ((high - low) or 1) * (len(bars) - 1))] for value in shown)


def folder_tree(folder: Path) -> Tree:
    """Return a folder's content with sizes."""
    tree = Tree(f"{folder if folder.parent == DEMO else folder.name}/", guide_style="dim")
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            tree.children.append(folder_tree(path))
        else:
            tree.add(f"{path.name}  [dim]{format_bytes(path.stat().st_size)}[/dim]")
    return tree


def expect(is_met: bool, failure: str, command: str) -> None:
    if not is_met:
        errors = output_of(command).with_suffix(".err").read_text().strip().splitlines()
        raise DemoFailedError("\n".join([f"{failure}: {files_of(command)}", *errors[-5:]]))


def quote(output: str) -> None:
    console.print(output.rstrip(), style="dim", markup=False, soft_wrap=True)


def warn(missed: str) -> None:
    console.print(f"[bold yellow]![/bold yellow] {missed}", soft_wrap=True)


def claim(proven: str) -> None:
    console.print(f"[bold green]✓[/bold green] {proven}", soft_wrap=True)


if __name__ == "__main__":
    main()
