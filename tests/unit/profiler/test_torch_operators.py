"""Which events of a profile are operators, by what torch says of them."""

import pytest

from meshwright.profiler.communication_op import EventRole, role_of


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("aten::mm", EventRole.OPERATOR),
        ("aten::add_", EventRole.OPERATOR),
        ("aten::_foreach_copy_", EventRole.OPERATOR),
        ("aten::zeros", EventRole.OPERATOR),
        ("nobodys::kernel", EventRole.OPERATOR),
        ("aten::linear", EventRole.WRAPPER),
        ("aten::matmul", EventRole.WRAPPER),
        ("aten::view", EventRole.WRAPPER),
        ("aten::split", EventRole.WRAPPER),
        ("aten::to", EventRole.WRAPPER),
        ("MmBackward0", EventRole.WRAPPER),
        ("autograd::engine::evaluate_function: MmBackward0", EventRole.WRAPPER),
        ("_c10d_functional::wait_tensor", EventRole.WRAPPER),
        ("_c10d_functional::all_reduce", EventRole.COLLECTIVE),
        ("c10d::_allgather_base_", EventRole.COLLECTIVE),
    ],
)
def test_an_operator_is_what_a_trace_records_too(name: str, role: EventRole) -> None:
    assert role_of(name) is role
