"""Names of dtypes in files, and torch's dtypes; apart from the manifest, which is read without torch."""

import torch

from meshwright.errors import CheckpointError


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return torch.float32 for "float32"; raises CheckpointError for a dtype that this torch lacks."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"a tensor has dtype {name}, which torch {torch.__version__} does not have: "
            "load it with the torch version that saved it (`meshwright checkpoint inspect` prints it)"
        )
    return dtype
