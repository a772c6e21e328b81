"""Warnings of torch's own compiler (2.13), which would stop it: marks for tests of compiled code."""

import pytest

_GRAD = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
DYNAMO_WARNINGS = pytest.mark.filterwarnings(
    _GRAD, "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)
"""It looks at .grad of tensors that are not leaves, and at what autograd functions are made of."""
COMPILER_WARNINGS = pytest.mark.filterwarnings(_GRAD, "ignore::DeprecationWarning")
"""The same, and those of Inductor."""
