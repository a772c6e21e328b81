"""Safetensors files: checked headers, the index of a folder, tensors read and written piece by piece."""
