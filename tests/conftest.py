"""What holds for every test: one thread per process, no network, no clock, warnings are errors (pyproject.toml)."""

import os

from hypothesis import HealthCheck, settings

# Before torch is imported anywhere: several ranks with several threads each would fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# hypothesis fails an example that took 0.2 s, which any does on a machine that is busy.
settings.register_profile("no_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_clock")
