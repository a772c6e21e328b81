"""Packages that the base install leaves out: which extra brings each, and importing one when it is first needed."""

import importlib
from types import ModuleType

from meshwright.errors import UnsupportedError

EXTRA_OF_PACKAGE = {
    "torch": "train",
    "safetensors": "train",
    "fsspec": "remote",
    "transformers": "hf",
    "tokenizers": "hf",
    "jinja2": "chat",
    "pyarrow": "parquet",
    "plotly": "report",
    "pandas": "pandas",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "torchao": "torchao",
}


def import_extra(module: str, purpose: str) -> ModuleType:
    """Return `module`; raises UnsupportedError saying which extra of Meshwright brings it."""
    package = "tensorboard" if module == "torch.utils.tensorboard" else module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{purpose} needs the package {package}, which cannot be imported ({error}): "
            f"run pip install '.[{EXTRA_OF_PACKAGE[package]}]' in Meshwright's checkout"
        ) from error
