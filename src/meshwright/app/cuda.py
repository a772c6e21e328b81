"""require_cuda(): --device cuda on a machine that has no such device, or too few, is refused before anything starts."""


def require_cuda(num_ranks: int = 1) -> None:
    """Raise ConfigError where torch does not see a CUDA device for each of `num_ranks`."""
    import torch

    from meshwright.errors import ConfigError
    from meshwright.units import counted

    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda, but torch {torch.__version__} sees no CUDA device: "
            "leave --device out or give cpu; `meshwright doctor` lists what is missing"
        )
    present = torch.cuda.device_count()
    if num_ranks > present:
        raise ConfigError(
            f"--device cuda, but {counted(num_ranks, 'rank')} need as many CUDA devices and torch sees {present}: "
            f"give layouts of {present} or fewer, or leave --device out"
        )
