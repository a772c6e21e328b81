"""quantization_config of a Hugging Face config.json: block-fp8 and MXFP4 are read, others refused by name."""

from typing import Any

from meshwright.errors import UnsupportedError

QUANTIZATION, BLOCK_KEY = "quantization_config", "weight_block_size"

_KNOWN_OF_MXFP4 = {"quant_method", "modules_to_not_convert"}
_KNOWN = {"quant_method", "fmt", "activation_scheme", "scale_fmt", "modules_to_not_convert", BLOCK_KEY}


def require_readable(config: dict[str, Any], source: str) -> None:
    """Raise UnsupportedError unless `config` is not quantised, or in block-fp8 or MXFP4, which only change storage."""
    quantization = config.get(QUANTIZATION)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    block = quantization.get(BLOCK_KEY) if isinstance(quantization, dict) else None
    if method == "mxfp4" and quantization.keys() <= _KNOWN_OF_MXFP4:
        return
    if method != "fp8" or block is None or (unknown := sorted(quantization.keys() - _KNOWN)):
        what = f" and {', '.join(unknown)}" if method == "fp8" and block is not None else ""
        raise UnsupportedError(
            f"{source} has {QUANTIZATION} with quant_method = {method!r}, {BLOCK_KEY} = {block!r}{what}, but only fp8 "
            f"with a {BLOCK_KEY} and mxfp4 are read: take a folder that is not quantised"
        )
