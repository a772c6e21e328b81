"""Patches of torch: what behaves differently under fake tensors than on a device."""
