"""What holds for every test: one thread per process, no network, no clock, warnings are errors (pyproject.toml)."""

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# Torch and thousands of tests are objects that stay: a third of their import would go into looking for garbage.
gc.disable()

_NUM_QUICK_EXAMPLES = 30
_OBJECTS_PER_COLLECTION = 50_000

_NEEDED = ("meshwright", "torch", "hypothesis", "xdist", "pytest_timeout")
if missing := [name for name in _NEEDED if find_spec(name) is None]:
    pytest.exit(
        f"the tests need packages that this Python does not have: {', '.join(missing)}; "
        "run `make test`, which installs them into .venv, or `make venv` and then .venv/bin/pytest",
        returncode=pytest.ExitCode.USAGE_ERROR,
    )

from hypothesis import HealthCheck, settings  # noqa: E402 - where it is not installed, the message above says so

from meshwright.log import log_level, set_log_level  # noqa: E402

# Before torch is imported anywhere: several ranks with several threads each would fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Workers of pytest-xdist have 80: pages are then as narrow as that.
os.environ.pop("COLUMNS", None)


def _flush(descriptor: int) -> None:
    """Check a descriptor as os.fsync does, without its wait for the disk, of 3 to 15 ms."""
    os.fstat(descriptor)


# What a flush keeps is lost only with the power: test_power_cut follows the calls. Processes that tests start flush.
os.fsync = _flush

# hypothesis fails an example that took 0.2 s, which any does on a machine that is busy.
settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("all"), max_examples=_NUM_QUICK_EXAMPLES)


def pytest_configure(config: pytest.Config) -> None:
    """Draw hypothesis's hundred examples of a property where long tests run, too."""
    settings.load_profile("quick" if config.option.markexpr.startswith("not long") else "all")


def pytest_collection_finish() -> None:
    """Collect the garbage of tests, but look for none in what was imported for them."""
    gc.freeze()
    # Python's own 700 objects are what one test makes; each look at all of them costs as much as many tests.
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    gc.enable()


@pytest.fixture(autouse=True)
def _log_level_of_one_test() -> Iterator[None]:
    """Undo the --quiet and --verbose of commands that a test runs in this process."""
    before = log_level()
    yield
    # Each call clears the caches of every logger of every package.
    if log_level() != before:
        set_log_level(before)
