"""python -m benchmarks.checkpoints.memory_curve: resident memory over the time of an export, as docs/export_memory.svg.

The dense model of hf_memory, 3.3 GiB of random float32 weights, is exported by `meshwright export`'s way, and for
contrast by loading all of it and calling save_pretrained. Each runs in a process of its own, sampled 50 times a second.

Expected, written before the first run: a line 0.2 GiB above the start for ours; for the other a slope up to 3.3 GiB
while it loads, then level while it writes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

from benchmarks.checkpoints.conversion import load_and_save_pretrained
from benchmarks.hf_memory import DENSE, write_run
from benchmarks.resident import resident_bytes
from meshwright.checkpoint.hf.export import export
from meshwright.checkpoint.hf.maps.shapes import stored_shapes

Curve = list[tuple[float, float]]
"""Seconds since the start, GiB above it."""

INTERVAL_S = 0.02
OURS, WHOLE = "meshwright export", "load all, save_pretrained"
COLOURS = {OURS: "#1565c0", WHOLE: "#c62828"}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 340, 56, 44, 44


def main() -> int:
    """Write the picture and print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=DENSE.num_layers)
    parser.add_argument("--out", type=Path, default=Path("docs/export_memory.svg"))
    parser.add_argument("--export", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = DENSE.replace(num_layers=arguments.layers)
    if arguments.export:
        way, folder = arguments.export
        stored_shapes(DENSE.replace(num_layers=1))
        act = load_and_save_pretrained(Path(folder)) if way == WHOLE else None
        print("ready", flush=True)
        sys.stdin.readline()
        if act is None:
            export(Path(folder) / "run", Path(folder) / "out")
        else:
            act()
        return 0
    curves = {}
    with tempfile.TemporaryDirectory(dir=".") as name:
        num_bytes = write_run(Path(name) / "run", model)
        for way in (OURS, WHOLE):
            curves[way] = curve([sys.executable, "-m", "benchmarks.checkpoints.memory_curve", "--export", way, name])
            (Path(name) / "out").rename(Path(name) / ("hf" if way == OURS else "other"))
    arguments.out.write_text(picture(curves, f"Export of {num_bytes / 2**30:.1f} GiB"), encoding="utf-8")
    for way, points in curves.items():
        print(f"{way}: {max(y for _, y in points):.2f} GiB above the start, {points[-1][0]:.1f} s")
    return 0


def curve(command: list[str]) -> Curve:
    """Return the memory of a process from when it says that it is ready to its end."""
    points: Curve = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = resident_bytes(process=process.pid)
        start_s = time.perf_counter()
        process.stdin.write("\n")
        process.stdin.flush()
        while process.poll() is None:
            try:
                now = resident_bytes(process=process.pid)
            except KeyError:  # it has ended and was not waited for
                break
            points.append((time.perf_counter() - start_s, (now - before) / 2**30))
            time.sleep(INTERVAL_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return points


def picture(curves: dict[str, Curve], title: str) -> str:
    """Return the curves as SVG, a line each with its name and peak."""
    end_s = max(points[-1][0] for points in curves.values())
    top = max(y for points in curves.values() for _, y in points) * 1.1
    across, up = (WIDTH - LEFT - 16) / end_s, (HEIGHT - TOP - BOTTOM) / top
    floor = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - 16}" fill="none" stroke="#555"/>',
        f'<text x="{LEFT}" y="{HEIGHT - 8}">{escape(title)}: resident GiB above the start, over seconds</text>',
    ]
    for tick in range(1, int(top) + 1):
        y = floor - tick * up
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 16}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    for tick_s in (end_s * part / 4 for part in range(1, 5)):
        parts.append(f'<text x="{LEFT + tick_s * across:.1f}" y="{floor + 16}" text-anchor="end">{tick_s:.0f}</text>')
    for row, (way, points) in enumerate(curves.items()):
        line = " ".join(f"{LEFT + x * across:.1f},{floor - y * up:.1f}" for x, y in thinned(points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[way]}" stroke-width="2"/>')
        label = f"{way}: {max(y for _, y in points):.2f} GiB"
        parts.append(f'<text x="{LEFT}" y="{16 + 18 * row}" fill="{COLOURS[way]}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def thinned(points: Curve, number: int = 400) -> Curve:
    """Return about `number` of them, of neighbours the highest."""
    step = max(1, len(points) // number)
    return [max(points[i : i + step], key=lambda point: point[1]) for i in range(0, len(points), step)]


if __name__ == "__main__":
    sys.exit(main())
