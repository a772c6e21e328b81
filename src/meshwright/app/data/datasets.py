"""The data of a job from Python: mw.datasets.prepare, stats, preview and verify."""

from meshwright.app.data.prepare import prepare as prepare
from meshwright.app.data.preview import preview as preview
from meshwright.app.data.stats import stats as stats
from meshwright.app.data.verify_data import verify as verify
