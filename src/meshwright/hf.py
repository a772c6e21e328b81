"""The data types of a table that stores a model of your own in Hugging Face folders (docs/how_to/own_model.md)."""

from meshwright.spec.model.hf.hugging_face_format import HuggingFaceFormat
from meshwright.spec.model.hf.name_map import Drop, NameMap, Part, Rename

__all__ = ["Drop", "HuggingFaceFormat", "NameMap", "Part", "Rename"]
