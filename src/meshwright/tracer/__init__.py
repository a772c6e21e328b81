"""The real step under fake tensors and a fake process group -> Trace.

Empty until the dry run is built.
"""
