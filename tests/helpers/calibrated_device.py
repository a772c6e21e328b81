"""A made-up calibration of an accelerator."""

from __future__ import annotations

from meshwright.spec.machine.device import AttentionPoint, Device, Figure, MatmulPoint, Source

_SOURCE = Source(title="made up", date="2026-11-26", kind="measured")


def calibrated(device: Device, share: float = 0.6) -> Device:
    """Return an accelerator with the tables that `meshwright calibrate` would write: rates that grow with sizes."""
    peak, sizes = device.dense_flops_per_s.bfloat16, (256, 1024, 4096, 16384)
    assert peak is not None
    assert device.memory_bytes_per_s is not None

    def rate(of_best: float) -> Figure:
        return Figure(value=of_best * share * peak.value, source=_SOURCE)

    points = tuple(
        MatmulPoint(
            dtype="bfloat16",
            num_rows=rows,
            num_columns=columns,
            inner=inner,
            flops_per_s=rate((rows * columns * inner / 16384**3) ** 0.25),
        )
        for rows in sizes
        for columns in sizes
        for inner in sizes
    )
    attention_points = tuple(
        AttentionPoint(
            dtype="bfloat16",
            num_heads=64,
            seq_len=seq_len,
            head_dim=width,
            forward_flops_per_s=rate(0.5 * (seq_len / 8192) ** 0.3),
            backward_flops_per_s=rate(0.4 * (seq_len / 8192) ** 0.3),
        )
        for seq_len in (512, 2048, 8192)
        for width in (64, 128)
    )
    return device.replace(
        matmul_points=points,
        attention_points=attention_points,
        measured_memory_bytes_per_s=Figure(value=0.7 * device.memory_bytes_per_s.value, source=_SOURCE),
        host_launch_s=Figure(value=6e-6, source=_SOURCE),
    )
