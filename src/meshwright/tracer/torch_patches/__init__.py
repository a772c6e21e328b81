"""What torch does otherwise under fake tensors than on a device, set right."""
