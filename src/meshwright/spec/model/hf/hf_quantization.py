"""quantization_config of a Hugging Face config.json: block-fp8 is read, anything else refused by name."""

from typing import Any

from meshwright.errors import UnsupportedError

QUANTIZATION, BLOCK_KEY = "quantization_config", "weight_block_size"

_KNOWN = {"quant_method", "fmt", "activation_scheme", "scale_fmt", "modules_to_not_convert", BLOCK_KEY}


def require_readable(config: dict[str, Any], source: str) -> None:
    """Raise UnsupportedError unless `config` is not quantised, or is in block-fp8, which only changes storage."""
    quantization = config.get(QUANTIZATION)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    block = quantization.get(BLOCK_KEY) if isinstance(quantization, dict) else None
    if method != "fp8" or block is None or (unknown := sorted(quantization.keys() - _KNOWN)):
        what = f" and {', '.join(unknown)}" if method == "fp8" and block is not None else ""
        raise UnsupportedError(
            f"{source} has {QUANTIZATION} with quant_method = {method!r}, {BLOCK_KEY} = {block!r}{what}, but only fp8 "
            f"with a {BLOCK_KEY} is read: take a folder that is not quantised"
        )
