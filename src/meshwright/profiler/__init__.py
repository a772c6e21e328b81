"""A real step under torch.profiler -> Timeline.

Empty until the dry run is built.
"""
