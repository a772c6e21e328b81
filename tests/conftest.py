"""What holds for every test: one thread per process, no network, warnings are errors (pyproject.toml)."""

import os

# Before torch is imported anywhere: several ranks with several threads each would fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
