"""torch.autocast on the simulated accelerator, by CUDA's lists of operators (aten/src/ATen/autocast_mode.h).

Each listed operator gets a kernel that casts its arguments and calls it again without autocast, as in C++. A
parameter's copy in the lower precision is cached until the outermost autocast ends. Checked against the dispatcher's
list of CUDA's operators (tests/fake_ranks/tracer/test_torch_patches.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from meshwright.tracer.torch_patches.torch_names import register_kernels, replace


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names(
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution "
    "_convolution _convolution.deprecated prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm "
    "baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
)
"""Matmuls, convolutions, attention: cast to the dtype of autocast."""
FLOAT32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm nuclear_norm "
    "nuclear_norm.dim frobenius_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim"
)
"""Numerically sensitive operators: cast to float32."""
FLOAT32_RESULT = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
"""Called with dtype = float32 unless the program sets it."""
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Cast to the widest dtype among the arguments."""

_casts: dict[int, tuple[Tensor, Tensor]] = {}
"""By id of a parameter, the parameter and its copy in the lower precision."""
_kept: list[torch.library.Library] = []


def cast_on(device_type: str) -> None:
    """Make torch.autocast(device_type) cast as on CUDA, permanently; the type must be torch's PrivateUse1."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _kept.append(others)
    for names, called in ((LOWER_PRECISION, _lower), (FLOAT32, _float32), (FLOAT32_RESULT, _result), (WIDEST, _widest)):
        kernels = {name: _without_autocast(device_type, _operator(name), called) for name in names}
        register_kernels("aten", kernels, "AutocastPrivateUse1")
    replace(torch, "clear_autocast_cache", _with_own_casts)


def _with_own_casts(clear: Callable[[], None]) -> Callable[[], None]:
    def cleared() -> None:
        _casts.clear()
        clear()

    return cleared


def lowered(value: Any, device_type: str) -> Any:
    """Return `value` with its tensors cast to the dtype of autocast."""
    dtype = torch.get_autocast_dtype(device_type)
    return tree_map_only(Tensor, lambda tensor: _cast(tensor, dtype, device_type), value)


Called = Callable[[Any, str, tuple[Any, ...], dict[str, Any]], Any]


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast(device_type: str, operator: Any, called: Called) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return called(operator, device_type, args, kwargs)

    return kernel


def _lower(operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _called_in(torch.get_autocast_dtype(device_type), operator, device_type, args, kwargs)


def _float32(operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _called_in(torch.float32, operator, device_type, args, kwargs)


def _result(operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if _is_eligible(args[0], device_type) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    return operator(**given)


def _widest(operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtypes: list[torch.dtype] = []
    tree_map_only(Tensor, lambda one: dtypes.append(one.dtype) if _is_eligible(one, device_type) else None, args)
    widest = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(device_type)
    return _called_in(widest, operator, device_type, args, kwargs)


def _called_in(
    dtype: torch.dtype, operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    args, kwargs = tree_map_only(Tensor, lambda tensor: _cast(tensor, dtype, device_type), (args, kwargs))
    return operator(*args, **kwargs)


def _is_eligible(tensor: Tensor, device_type: str) -> bool:
    is_here = tensor.device.type == device_type
    return is_here and tensor.dtype.is_floating_point and tensor.dtype != torch.float64


def _cast(tensor: Tensor, dtype: torch.dtype, device_type: str) -> Tensor:
    if not _is_eligible(tensor, device_type) or tensor.dtype == dtype:
        return tensor
    is_weight = tensor.requires_grad and tensor.is_leaf and tensor._base is None and tensor.dtype == torch.float32
    if not (is_weight and dtype == torch.get_autocast_dtype(device_type) and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    if id(tensor) not in _casts:
        _casts[id(tensor)] = tensor, tensor.to(dtype)
    return _casts[id(tensor)][1]
