"""Which events of a profile are operators, by what torch says of them."""

import pytest

from meshwright.profiler.torch_operators import Role, role_of


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("aten::mm", Role.OPERATOR),
        ("aten::add_", Role.OPERATOR),
        ("aten::_foreach_copy_", Role.OPERATOR),
        ("aten::zeros", Role.OPERATOR),
        ("nobodys::kernel", Role.OPERATOR),
        ("aten::linear", Role.PASSAGE),
        ("aten::matmul", Role.PASSAGE),
        ("aten::view", Role.PASSAGE),
        ("aten::split", Role.PASSAGE),
        ("aten::to", Role.PASSAGE),
        ("MmBackward0", Role.PASSAGE),
        ("autograd::engine::evaluate_function: MmBackward0", Role.PASSAGE),
        ("_c10d_functional::wait_tensor", Role.PASSAGE),
        ("_c10d_functional::all_reduce", Role.COLLECTIVE),
        ("c10d::_allgather_base_", Role.COLLECTIVE),
    ],
)
def test_an_operator_is_what_a_trace_records_too(name: str, role: Role) -> None:
    assert role_of(name) is role
