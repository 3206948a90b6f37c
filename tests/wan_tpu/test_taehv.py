"""TAEHV's decoder against plain torch that follows the published code frame by frame, with random weights."""

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch.nn import functional

from scripts.published.taehv_file import make_file
from wan_tpu import GenerationRequest
from wan_tpu.errors import InvalidInput
from wan_tpu.previews.painter import Painter
from wan_tpu.previews.taehv import TinyDecoder
from wan_tpu.runtime.mesh import make_mesh


class Reference:
    """Decodes one clip, one frame after the other, with what each block has seen last."""

    def __init__(self, weights, *, patch, is_super, every_frame, enlargements):
        self.weights, self.patch, self.is_super = weights, patch, is_super
        self.every_frame, self.enlargements = every_frame, enlargements
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
            if enlarged < self.enlargements:
                x = functional.interpolate(x, scale_factor=2)
            frames = [self.conv(position + 2, frame) for frame in self.grow(position + 1, x)]
            position += 3
        return [picture for frame in frames for picture in self.after(position, enlarged + 1, frame)]


def host_mesh():
    return make_mesh((1, 1, 1), heads=1, devices=jax.local_devices(backend="cpu")[:1])


@pytest.mark.parametrize(
    ("channels", "patch", "is_super", "growths", "every_frame", "enlargements"),
    [
        (16, 1, False, (1, 2, 2), True, 3),
        pytest.param(48, 2, False, (1, 2, 2), False, 3, marks=pytest.mark.thorough),
        (128, 4, False, (2, 2, 2), True, 2),
        (32, 2, True, (1, 2, 2), False, 3),
    ],
)
def test_decoder_equals_plain_torch(channels, patch, is_super, growths, every_frame, enlargements, tmp_path):
    path = tmp_path / "tiny.safetensors"
    weights = make_file(path, channels=channels, patch=patch, is_super=is_super, growths=growths)
    decoder = TinyDecoder(path, host_mesh(), every_frame=every_frame)
    assert decoder.channels == channels
    latents = np.random.default_rng(1).standard_normal((2, 2, channels, 3, 2)).astype(np.float32) * 2
    pictures = decoder.decode(latents, enlargements=enlargements)
    with torch.no_grad():
        expected = torch.stack(
            [
                Reference(
                    weights, patch=patch, is_super=is_super, every_frame=every_frame, enlargements=enlargements
                ).decode(clip)
                for clip in torch.from_numpy(latents)
            ]
        ).numpy()
    enlarged = 2**enlargements * patch
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


def test_painter_shows_the_middle_frame_as_it_follows_the_one_before(pipeline, tmp_path):
    model, path = pipeline("wan2.1-t2v-1.3b").runtime.model, tmp_path / "tiny.safetensors"
    weights = make_file(path)
    request = model.spec.plan(GenerationRequest(prompt="a cat", height=32, width=48, frames=9)).request
    latents = np.random.default_rng(1).standard_normal((1, 16, 3, 4, 6)).astype(np.float32)
    picture = np.asarray(Painter(model, path).paint(latents, None, request)).astype(int)
    assert picture.shape == (32, 48, 3)
    reference = Reference(weights, patch=1, is_super=False, every_frame=False, enlargements=3)
    with torch.no_grad():
        expected = reference.decode(torch.from_numpy(latents[0].swapaxes(0, 1)[:2]))[-1].permute(1, 2, 0).numpy()
    assert np.abs(picture - 255 * expected).max() <= 0.6  # Both round to whole numbers.

    request = model.spec.plan(GenerationRequest(prompt="a cat", height=32, width=1600, frames=1)).request
    wide = np.random.default_rng(1).standard_normal((1, 16, 1, 4, 200)).astype(np.float32)
    reference = Reference(weights, patch=1, is_super=False, every_frame=False, enlargements=0)
    with torch.no_grad():
        expected = reference.decode(torch.from_numpy(wide[0, :, [0, 0]]))[-1].permute(1, 2, 0).numpy()
    small = Image.fromarray(np.round(255 * expected).astype(np.uint8)).resize((480, 10), Image.Resampling.BICUBIC)
    picture = np.asarray(Painter(model, path).paint(wide, None, request)).astype(int)
    assert np.abs(picture - np.asarray(small)).max() <= 2  # A value that is rounded otherwise has weights above 1.

    make_file(path, channels=48)
    with pytest.raises(InvalidInput):
        Painter(model, path)
