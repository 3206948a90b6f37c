"""The decoder of TAEHV, a tiny autoencoder whose pictures resemble those of a video model's VAE.

Source: github.com/madebyollin/taehv (MIT), taehv.py at 1f14a56. Its files (taew2_1, taew2_2, taehv1_5, taeltx_2,
taecvx, taeh3, and the "super" ones) have the decoder's weights under the positions of its blocks. Blocks remember the
frame before: convolutions over both, from zeros before the first. Latents are those that the transformer denoises.

Previews need neither every frame nor every pixel. As in the published code, growth in time can be turned off, so that
each latent frame becomes one picture, the last that it stands for; and so can enlargements, the last ones first.

Shapes: N clips, T frames, C channels, H W height and width.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import safetensors
import safetensors.numpy
import torch
from jax.sharding import Mesh
from torch import nn

from wan_tpu.errors import InvalidInput
from wan_tpu.runtime.bridge import Params, call
from wan_tpu.runtime.program import Program, place

ENLARGEMENTS = 3  # Each doubles height and width.
_WIDTHS = (256, 128, 64, 64)  # Channels before the first enlargement, and after each.
_SUPER_WIDTHS = (512, 256, 128, 64)
_REMEMBERING = 3  # Blocks that remember the frame before, in front of each enlargement.
_LIMIT = 3.0  # Latents are softly limited to this size.


class TinyDecoder:
    """A decoder with the weights of a file.

    Attributes:
        channels: C of its latents.
    """

    def __init__(self, path: str | Path, mesh: Mesh, *, every_frame: bool = False) -> None:
        """Read a file.

        Args:
            path: A file of safetensors from TAEHV.
            mesh: The device to run on.
            every_frame: Decode all frames of a latent frame instead of the last one.

        Raises:
            InvalidInput: The file can't be read, or isn't TAEHV's.
        """
        self._mesh = mesh
        tensors = _read(path)
        try:
            self._module, self.channels = _build(tensors, every_frame=every_frame)
            weights = {name: _last_rows(tensors[name], p.shape) for name, p in self._module.named_parameters()}
        except (KeyError, ValueError) as error:
            raise InvalidInput(
                f"{path} isn't a TAEHV decoder ({error}); give a file of github.com/madebyollin/taehv/safetensors"
            ) from None
        self._params = place(weights, mesh)
        self._programs = [self._make_program(number) for number in range(ENLARGEMENTS + 1)]

    def decode(self, latents: np.ndarray, *, enlargements: int = ENLARGEMENTS) -> np.ndarray:
        """Decode clips.

        Args:
            latents: float32 [N, T, C, H, W].
            enlargements: How often to enlarge the pictures, at most and by default as often as the VAE does. A "super"
                decoder always enlarges them as often, because its enlargements have weights.

        Returns:
            Pictures, float32 [N, T, 3, H, W] in [0, 1]; with every frame, T is larger.
        """
        return np.asarray(self._programs[enlargements](self._params, place(latents, self._mesh)))

    def _make_program(self, enlargements: int) -> Program:
        def decode(params: Params, latents: jax.Array) -> Any:
            return call(self._module, params, lambda module, x: module(x, enlargements), latents)

        return Program(decode, self._mesh, exact=True, name=f"tiny decoder, {enlargements} enlargements")


def _read(path: str | Path) -> dict[str, np.ndarray]:
    """Return the decoder's tensors without the prefix of their names, float32."""
    try:
        tensors = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError, KeyError) as error:
        raise InvalidInput(f"the preview's decoder {path} can't be read ({error})") from None
    prefix = "decoder."
    return {
        name.removeprefix(prefix): tensor.astype(np.float32)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _last_rows(tensor: np.ndarray, shape: torch.Size) -> np.ndarray:
    """Return a weight for a module of that shape; one that grows less in time has the last frames' rows."""
    rows = tensor[len(tensor) - shape[0] :]
    if rows.shape != tuple(shape):
        raise ValueError(f"a weight is {tensor.shape} instead of {tuple(shape)}")
    return rows


def _build(tensors: dict[str, np.ndarray], *, every_frame: bool) -> tuple["_Decoder", int]:
    """Return the module that a file's weights fit, on the meta device, and the channels of its latents."""
    is_super = "0.weight" in tensors
    growths = [name for name in tensors if name.endswith(".conv.weight")]  # Only these have a single convolution.
    positions = sorted(int(name.partition(".")[0]) for name in growths)
    shapes = [tensors[f"{i}.conv.weight"].shape for i in positions]
    grown = [outputs // inputs if every_frame else 1 for outputs, inputs, *_ in shapes]
    channels = tensors["0.weight" if is_super else "1.weight"].shape[1]
    outputs = max((int(name.partition(".")[0]), len(tensor)) for name, tensor in tensors.items())[1]
    patch = math.isqrt(outputs // 3)
    if len(grown) != ENLARGEMENTS or 3 * patch**2 != outputs:
        raise ValueError(f"it has {len(grown)} growths and {outputs} outputs")
    with torch.device("meta"):
        make = _super_blocks if is_super else _blocks
        module = _Decoder(make(channels, grown, outputs), patch)
    return module.eval().requires_grad_(False), channels


def _blocks(channels: int, grown: list[int], outputs: int) -> list[nn.Module]:
    blocks: list[nn.Module] = [_SoftLimit(), _conv(channels, _WIDTHS[0]), nn.ReLU()]
    for (here, there), frames in zip(itertools.pairwise(_WIDTHS), grown, strict=True):
        blocks += [_Remembering(here) for _ in range(_REMEMBERING)]
        blocks += [_Enlarge(), _Grow(here, frames), _conv(here, there, bias=False)]
    return [*blocks, nn.ReLU(), _conv(_WIDTHS[-1], outputs)]


def _super_blocks(channels: int, grown: list[int], outputs: int) -> list[nn.Module]:
    blocks: list[nn.Module] = [nn.Conv2d(channels, _SUPER_WIDTHS[0], 1, bias=False)]
    for (here, there), frames in zip(itertools.pairwise(_SUPER_WIDTHS), grown, strict=True):
        blocks += [_WideRemembering(here) for _ in range(_REMEMBERING)]
        blocks += [_conv(here, 4 * there), nn.ReLU(), _Unfold(), _Grow(there, frames)]
    return [*blocks, _conv(_SUPER_WIDTHS[-1], outputs)]


def _conv(inputs: int, outputs: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)


def _unfold(x: torch.Tensor, patch: int) -> torch.Tensor:
    """Turn groups of patch x patch channels [N, C, H, W] into pixels."""
    count, channels, height, width = x.shape
    x = x.reshape(count, channels // patch**2, patch, patch, height, width).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(count, channels // patch**2, height * patch, width * patch)


class _Decoder(nn.Sequential):
    """The blocks in order, on all frames of all clips at once."""

    def __init__(self, blocks: list[nn.Module], patch: int) -> None:
        super().__init__(*blocks)
        self._patch = patch

    def forward(self, latents: torch.Tensor, enlargements: int) -> torch.Tensor:
        """Decode latents [N, T, C, H, W] as pictures [N, T, 3, H, W] in [0, 1]."""
        clips, x = latents.shape[0], latents.flatten(0, 1)
        skipped = [block for block in self if isinstance(block, _Enlarge)][enlargements:]
        for block in self:
            if block in skipped:
                continue
            if isinstance(block, _Remembering | _WideRemembering):
                frames = x.unflatten(0, (clips, -1))
                before = torch.cat([torch.zeros_like(frames[:, :1]), frames[:, :-1]], dim=1).flatten(0, 1)
                x = block(x, before)
            else:
                x = block(x)
        return _unfold(x, self._patch).clamp(0, 1).unflatten(0, (clips, -1))


class _SoftLimit(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LIMIT * torch.tanh(x / _LIMIT)


class _Remembering(nn.Module):
    """Three convolutions over a frame and the one before, added to the frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        convolutions = _conv(2 * width, width), _conv(width, width), _conv(width, width)
        self.conv = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU(), convolutions[2])

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.conv(torch.cat([x, before], dim=1)))


class _WideRemembering(nn.Module):
    """A convolution of each channel over 7 x 7 pixels, then two of single pixels, added to the frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * width, 2 * width, 7, padding=3, groups=2 * width, bias=False),
            nn.Conv2d(2 * width, 4 * width, 1),
            nn.ReLU(),
            nn.Conv2d(4 * width, width, 1, bias=False),
        )

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return x + self.conv(torch.cat([x, before], dim=1))


class _Enlarge(nn.Module):
    """Repeats every pixel in two rows and two columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, channels, height, width = x.shape
        x = x[:, :, :, None, :, None].expand(count, channels, height, 2, width, 2)
        return x.reshape(count, channels, 2 * height, 2 * width)


class _Unfold(nn.Module):
    """Turns groups of four channels into 2 x 2 pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _unfold(x, 2)


class _Grow(nn.Module):
    """Makes several frames of each."""

    def __init__(self, width: int, frames: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * frames, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).reshape(-1, *x.shape[1:])
