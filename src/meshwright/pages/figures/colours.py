"""What each thing is called and coloured in pictures of a step, the same in all of them."""

ACTIONS = {
    "F": ("forward", "#4C86C6"),
    "B": ("backward", "#E58A45"),
    "I": ("backward to inputs", "#E58A45"),
    "W": ("backward to weights", "#F2C261"),
}
"""By kind of a pipeline's action."""

PHASES = {
    "forward": "#4C86C6",
    "backward": "#E58A45",
    "recompute": "#A58AC9",
    "optimizer": "#5AA27C",
}
"""By phase of what is in no action."""

COMPUTE = {"matmul": "#2F6DB3", "attention": "#6C5BB0", "other": "#8FB8DE"}
"""By kind of operation."""

AXES = {
    "tp": "#D1495B",
    "etp": "#D1495B",
    "cp": "#E07A9B",
    "ep": "#B5527C",
    "fsdp": "#C98B2B",
    "expert_dp_shard": "#C98B2B",
    "fsdp_reduce": "#C98B2B",
    "expert_dp_shard_reduce": "#C98B2B",
    "dp_replicate": "#A87432",
    "pp": "#3E9C92",
}
"""By the mesh axis that communication runs along."""

ROLES = {
    "parameter": "#35618F",
    "gradient": "#5AA27C",
    "optimizer_state": "#86A9CE",
    "unsharded_parameter": "#C98B2B",
    "activation": "#E58A45",
    "communication": "#D1495B",
    "temporary": "#A58AC9",
    "other": "#A9AFB7",
}
"""By TensorRole, lower case."""

MEMORY = {
    "parameters_bytes": ROLES["parameter"],
    "gradients_bytes": ROLES["gradient"],
    "optimizer_state_bytes": ROLES["optimizer_state"],
    "unsharded_parameters_bytes": ROLES["unsharded_parameter"],
    "activations_bytes": ROLES["activation"],
    "logits_bytes": "#F2C261",
    "communication_buffers_bytes": ROLES["communication"],
    "workspace_bytes": ROLES["temporary"],
    "fragmentation_bytes": "#D5D8DD",
    "cached_bytes": "#E9EBEE",
}
"""By field of MemoryUse that the allocator reserves."""

WAIT, HOST, REST = "#DADDE2", "#B9BEC7", "#8A929D"
EXPOSED, HIDDEN, PREDICTED = "#C0392B", "#BFD8C8", "#C3CAD3"
