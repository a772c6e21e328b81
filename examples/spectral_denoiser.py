"""Bring your own model, data and loss: a network, not of language, that cleans noisy tones through their spectrum.

Shapes: B batch, T samples of a waveform, W bins of its spectrum, C channels.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Waveforms:
    """Three tones of random pitch, loudness and phase, under white noise of equal power."""

    def __init__(self, num_samples: int = 4096, length: int = 512) -> None:
        self.num_samples, self.length = num_samples, length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        # Sample i is a function of i, so that any rank can make it, again and in any order.
        random = np.random.default_rng(index)
        pitch, phase, loudness = random.uniform([[0.02], [0], [0.3]], [[0.4], [1], [1]], size=(3, 3))
        time = np.arange(self.length)[:, None]
        clean = (loudness * np.sin(2 * np.pi * (pitch * time + phase))).sum(1)
        noisy = clean + clean.std() * random.standard_normal(self.length)
        return noisy.astype(np.float32), clean.astype(np.float32)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(1, channels), nn.Conv1d(channels, channels, kernel_size=5, padding=2)

    def forward(self, x_BCW: Tensor) -> Tensor:
        return x_BCW + self.mix(F.gelu(self.norm(x_BCW)))


class Denoiser(nn.Module):
    """Learns how much of each frequency to let through, from the whole spectrum around it."""

    def __init__(self, channels: int = 32, num_blocks: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, channels, kernel_size=5, padding=2)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(num_blocks))
        self.leave = nn.Conv1d(channels, 1, kernel_size=1)

    def forward(self, noisy_BT: Tensor) -> Tensor:
        spectrum_BW = torch.fft.rfft(noisy_BT.float(), norm="ortho")
        x_BCW = self.enter(spectrum_BW.abs().log1p()[:, None].type_as(noisy_BT))
        for block in self.blocks:
            x_BCW = block(x_BCW)
        gain_BW = self.leave(x_BCW)[:, 0].sigmoid()
        return torch.fft.irfft(gain_BW * spectrum_BW, n=noisy_BT.shape[-1], norm="ortho")

    def loss(self, cleaned_BT: Tensor, clean_BT: Tensor) -> Tensor:
        """Return the noise that is left as a share of the signal's power: 1 when nothing was done."""
        return ((cleaned_BT - clean_BT).square().mean(-1) / clean_BT.square().mean(-1)).mean()
