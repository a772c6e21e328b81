"""Types of the arrays that formulas compute with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Passes = tuple[Floats, Floats]
"""Forward and backward."""
