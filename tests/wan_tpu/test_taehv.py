"""TAEHV's decoder against plain torch that follows the published code frame by frame, with random weights."""

import jax
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from torch.nn import functional

from wan_tpu import GenerationRequest
from wan_tpu.errors import InvalidInput
from wan_tpu.previews.painter import Painter
from wan_tpu.previews.taehv import TinyDecoder
from wan_tpu.runtime.mesh import make_mesh

GROWTHS = (1, 2, 2)


def make_file(path, *, channels=16, patch=1, is_super=False, growths=GROWTHS):
    """Write a file with random weights under the names of the published ones, in float16."""
    rng, tensors = np.random.default_rng(0), {}

    def add(name, outputs, inputs, side=3, groups=1, bias=True):
        scale = 1.2 / np.sqrt(inputs // groups * side * side)
        tensors[f"decoder.{name}.weight"] = rng.standard_normal((outputs, inputs // groups, side, side)) * scale
        if bias:
            tensors[f"decoder.{name}.bias"] = rng.standard_normal(outputs) * 0.1

    widths = (512, 256, 128, 64) if is_super else (256, 128, 64, 64)
    if is_super:
        add(0, widths[0], channels, side=1, bias=False)
    else:
        add(1, widths[0], channels)
    position = 1 if is_super else 3
    for here, there, growth in zip(widths, widths[1:], growths, strict=False):
        for _ in range(3):
            if is_super:
                add(f"{position}.conv.0", 2 * here, 2 * here, side=7, groups=2 * here, bias=False)
                add(f"{position}.conv.1", 4 * here, 2 * here, side=1)
                add(f"{position}.conv.3", here, 4 * here, side=1, bias=False)
            else:
                add(f"{position}.conv.0", here, 2 * here)
                add(f"{position}.conv.2", here, here)
                add(f"{position}.conv.4", here, here)
            position += 1
        if is_super:
            add(position, 4 * there, here)
            add(f"{position + 3}.conv", there * growth, there, side=1, bias=False)
            position += 4
        else:
            add(f"{position + 1}.conv", here * growth, here, side=1, bias=False)
            add(position + 2, there, here, bias=False)
            position += 3
    add(22, 3 * patch**2, widths[-1])
    tensors["encoder.0.weight"] = np.zeros((64, 3, 3, 3))
    safetensors.numpy.save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, path)
    return {name: torch.from_numpy(tensor.astype(np.float16).astype(np.float32)) for name, tensor in tensors.items()}


class Reference:
    """Decodes one clip, one frame after the other, with what each block has seen last."""

    def __init__(self, weights, *, patch, is_super, every_frame, whole):
        self.weights, self.patch, self.is_super = weights, patch, is_super
        self.every_frame, self.whole = every_frame, whole
        self.memory = {}

    def conv(self, name, x, groups=1):
        weight = self.weights[f"decoder.{name}.weight"]
        bias = self.weights.get(f"decoder.{name}.bias")
        return functional.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=groups)

    def remember(self, i, x):
        both = torch.cat([x, self.memory.get(i, torch.zeros_like(x))], dim=1)
        self.memory[i] = x
        if self.is_super:
            y = self.conv(f"{i}.conv.0", both, groups=both.shape[1])
            return x + self.conv(f"{i}.conv.3", functional.relu(self.conv(f"{i}.conv.1", y)))
        y = functional.relu(self.conv(f"{i}.conv.2", functional.relu(self.conv(f"{i}.conv.0", both))))
        return functional.relu(x + self.conv(f"{i}.conv.4", y))

    def grow(self, i, x):
        frames = self.conv(f"{i}.conv", x).split(x.shape[1], dim=1)
        return frames if self.every_frame else frames[-1:]

    def decode(self, latents):
        """Return the pictures of latents [T, C, H, W]."""
        pictures = []
        for frame in latents:
            if self.is_super:
                pictures += self.after(1, 0, self.conv(0, frame[None]))
            else:
                pictures += self.after(3, 0, functional.relu(self.conv(1, 3 * torch.tanh(frame[None] / 3))))
        return torch.cat(pictures)

    def after(self, position, enlarged, x):
        if enlarged == 3:
            x = self.conv(22, x if self.is_super else functional.relu(x))
            return [functional.pixel_shuffle(x, self.patch).clamp(0, 1)]
        for i in range(3):
            x = self.remember(position + i, x)
        position += 3
        if self.is_super:
            x = functional.pixel_shuffle(functional.relu(self.conv(position, x)), 2)
            frames, position = self.grow(position + 3, x), position + 4
        else:
            if enlarged < 2 or self.whole:
                x = functional.interpolate(x, scale_factor=2)
            frames = [self.conv(position + 2, frame) for frame in self.grow(position + 1, x)]
            position += 3
        return [picture for frame in frames for picture in self.after(position, enlarged + 1, frame)]


def host_mesh():
    return make_mesh((1, 1, 1), heads=1, devices=jax.local_devices(backend="cpu")[:1])


@pytest.mark.parametrize(
    ("channels", "patch", "is_super", "growths", "every_frame", "whole"),
    [
        (16, 1, False, (1, 2, 2), True, True),
        (48, 2, False, (1, 2, 2), False, True),
        (16, 1, False, (1, 2, 2), False, False),
        (128, 4, False, (2, 2, 2), True, False),
        (32, 2, True, (1, 2, 2), False, True),
    ],
)
def test_decoder_equals_plain_torch(channels, patch, is_super, growths, every_frame, whole, tmp_path):
    path = tmp_path / "tiny.safetensors"
    weights = make_file(path, channels=channels, patch=patch, is_super=is_super, growths=growths)
    decoder = TinyDecoder(path, host_mesh(), every_frame=every_frame)
    assert decoder.channels == channels
    latents = np.random.default_rng(1).standard_normal((2, 2, channels, 3, 2)).astype(np.float32) * 2
    pictures = decoder.decode(latents, whole=whole)
    with torch.no_grad():
        expected = torch.stack(
            [
                Reference(weights, patch=patch, is_super=is_super, every_frame=every_frame, whole=whole).decode(clip)
                for clip in torch.from_numpy(latents)
            ]
        ).numpy()
    enlarged = (8 if whole else 4) * patch
    frames = 2 * (int(np.prod(growths)) if every_frame else 1)
    assert pictures.shape == expected.shape == (2, frames, 3, 3 * enlarged, 2 * enlarged)
    assert expected.std() > 0.1
    # Both add up to 4,600 products of float32 in each of 23 convolutions, in another order.
    np.testing.assert_allclose(pictures, expected, atol=2e-4)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    with pytest.raises(InvalidInput):
        TinyDecoder(path, host_mesh())
    path.write_bytes(b"no safetensors")
    with pytest.raises(InvalidInput):
        TinyDecoder(path, host_mesh())
    safetensors.numpy.save_file({"blocks.0.weight": np.zeros((2, 2), np.float32)}, path)
    with pytest.raises(InvalidInput):
        TinyDecoder(path, host_mesh())
    tensors = dict(make_file(path))
    tensors["decoder.8.weight"] = tensors["decoder.8.weight"][:, :100].contiguous()
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(InvalidInput):
        TinyDecoder(path, host_mesh())


def test_painter_shows_each_frame_as_it_follows_the_one_before(pipeline, tmp_path):
    model, path = pipeline("wan2.1-t2v-1.3b").runtime.model, tmp_path / "tiny.safetensors"
    weights = make_file(path)
    request = model.spec.plan(GenerationRequest(prompt="a cat", height=32, width=48, frames=9)).request
    latents = np.random.default_rng(1).standard_normal((1, 16, 3, 4, 6)).astype(np.float32)
    picture = np.asarray(Painter(model, path).paint(latents, None, request)).astype(int)
    assert picture.shape == (64, 96, 3)
    reference = Reference(weights, patch=1, is_super=False, every_frame=False, whole=True)
    with torch.no_grad():
        expected = reference.decode(torch.from_numpy(latents[0].swapaxes(0, 1)[1:]))[-1].permute(1, 2, 0).numpy()
    assert np.abs(picture[32:, :48] - 255 * expected).max() <= 0.6  # Both round to whole numbers.

    make_file(path, channels=48)
    with pytest.raises(InvalidInput):
        Painter(model, path)
