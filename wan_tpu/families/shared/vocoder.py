"""The parts of BigVGAN and its relatives, which turn a few channels at a low rate into samples, always in float32.

They are written in JAX, with time first and channels last: torch's signals of few channels suit a TPU badly, and
antialiased activations, which double a signal's rate and halve it again, need no array of the doubled rate here.
A convolution is a loop over its taps, each a matrix product: a TPU's compiler takes 15 seconds for a convolution of a
long signal to one or two channels, and one for such a loop.

Each device computes a part of the samples, from its own rows and all rows that affect them: nothing is exchanged before
the end.

Shapes: N signals, T rows of a signal, C I O channels, K taps of a filter.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.runtime.bridge import Params

EXACT = jax.lax.Precision.HIGHEST
RATIO = 2  # Factor by which an activation raises a signal's rate.


class Weights:
    """The weights of one part of a module."""

    def __init__(self, params: Params, prefix: str = "") -> None:
        self._params, self._prefix = params, prefix

    def __getitem__(self, name: str) -> jax.Array:
        return self._params[self._prefix + name]

    def get(self, name: str) -> jax.Array | None:
        """Return a weight, or None."""
        return self._params.get(self._prefix + name)

    def part(self, name: str) -> "Weights":
        """Return the weights of a part of this part."""
        return Weights(self._params, f"{self._prefix}{name}.")


class Convolution(NamedTuple):
    """The weights of a convolution.

    Attributes:
        weight: [O, I, K], or [I, O, K] of a transposed one.
        bias: [O].
        gain: The norm of each row of the weight, [O, 1, 1] or [I, 1, 1]; None if the weight has its own norm.
    """

    weight: jax.Array
    bias: jax.Array | None = None
    gain: jax.Array | None = None


class Snake(NamedTuple):
    """The weights of an antialiased activation.

    Attributes:
        frequency: Logarithm of the frequency of the sine, [C].
        damping: Logarithm of its divisor, [C].
        up: Filter before the activation, [K].
        down: Filter after it, [K].
    """

    frequency: jax.Array
    damping: jax.Array
    up: jax.Array
    down: jax.Array


Half = tuple[Convolution, Snake | None]  # Half of a layer: a convolution, and the activation before it.


@dataclass(frozen=True)
class Window:
    """The rows of a signal that an array [T, C] holds; its rows outside of the signal are meaningless.

    Attributes:
        first: The index of its first row; negative before the signal begins.
        total: The number of rows of the signal.
    """

    first: jax.Array | int
    total: int

    def times(self, ratio: int) -> "Window":
        """Return the window at another rate."""
        return Window(self.first * ratio, self.total * ratio)

    def silence_outside(self, x: jax.Array) -> jax.Array:
        """Return an array with zeros before and after the signal."""
        if self._is_whole(x):
            return x
        rows = self._rows(x)
        return jnp.where((rows >= 0) & (rows < self.total), x, 0)

    def repeat_ends(self, x: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
        """Return an array with the first row of one before the signal, and the last of another after it."""
        if self._is_whole(x):
            return x
        rows = self._rows(x)
        return jnp.where(
            rows < 0, self._row(first, 0), jnp.where(rows >= self.total, self._row(last, self.total - 1), x)
        )

    def _is_whole(self, x: jax.Array) -> bool:
        return isinstance(self.first, int) and len(x) == self.total

    def _rows(self, x: jax.Array) -> jax.Array:
        return (self.first + jnp.arange(len(x)))[:, None]

    def _row(self, x: jax.Array, number: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, jnp.clip(number - self.first, 0, len(x) - 1), 1)


def share_signals(
    run: Callable[[Params, jax.Array, Window], jax.Array], params: Params, signals: jax.Array, reach: int, mesh: Mesh
) -> jax.Array:
    """Return the samples [N, samples, O] of signals [N, T, C]; each device computes a part of one signal, or of all.

    Args:
        run: Turns a part of a signal [T, C] into samples, equally many for each row.
        params: Its weights, which every device has.
        signals: The signals, which every device has.
        reach: How many rows on each side samples depend on.
        mesh: The devices.
    """
    count, rows = signals.shape[:2]
    groups = math.gcd(count, mesh.size)
    parts = mesh.size // groups
    part_rows = -(-rows // parts)
    if part_rows + 2 * reach >= rows:
        part_rows, parts, reach = rows, 1, 0
    if groups * parts == 1:
        return jax.vmap(lambda signal: run(params, signal, Window(0, rows)))(signals)

    def run_share(params: Params, signals: jax.Array) -> jax.Array:
        group, part = jnp.divmod(jax.lax.axis_index(mesh.axis_names), parts)
        first = 0 if parts == 1 else part * part_rows - reach
        sizes = (count // groups, part_rows + 2 * reach, signals.shape[2])
        share = jax.lax.dynamic_slice(signals, (group % groups * sizes[0], part * part_rows, 0), sizes)
        samples = jax.vmap(lambda signal: run(params, signal, Window(first, rows)))(share)
        ratio = samples.shape[1] // share.shape[1]
        return samples[None, :, reach * ratio : (reach + part_rows) * ratio]

    padded = jnp.pad(signals, ((0, 0), (reach, part_rows * parts - rows + reach), (0, 0)))
    run_all = jax.shard_map(run_share, mesh=mesh, in_specs=(P(), P()), out_specs=P(mesh.axis_names), check_vma=False)
    shares = run_all(params, padded)[: groups * parts]
    shares = shares.reshape(groups, parts, *shares.shape[1:]).swapaxes(1, 2)
    samples = shares.reshape(count, -1, shares.shape[-1])
    return samples[:, : samples.shape[1] // (part_rows * parts) * rows]


def convolve(convolution: Convolution, x: jax.Array, window: Window) -> jax.Array:
    """Convolve a signal [T, I] with zeros around it, keeping its length."""
    before = (convolution.weight.shape[2] - 1) // 2
    return _convolve_dilated(_by_tap(convolution), x, window, 1, before)


def convolve_transposed(convolution: Convolution, x: jax.Array, window: Window, stride: int) -> jax.Array:
    """Return a signal [T, I] at `stride` times its rate, as torch's ConvTranspose1d computes it.

    Each of the `stride` rows that a row becomes is computed by an ordinary convolution, of every `stride`th tap.
    """
    weight, bias, gain = convolution
    inputs, outputs, taps = weight.shape
    if gain is not None:
        x = x * _normalise(weight, gain, (1, 2))
    crop = (taps - stride) // 2
    after, before = (stride - 1 + crop) // stride, (taps - 1 - crop) // stride
    missing = stride * (before + 1 + after) - taps
    start = stride * after - crop
    matrices = jnp.pad(weight.transpose(2, 0, 1), ((start, missing - start), (0, 0), (0, 0)))
    matrices = matrices.reshape(-1, stride, inputs, outputs)[::-1].swapaxes(0, 1)

    def run_phase(_: None, matrices: jax.Array) -> tuple[None, jax.Array]:
        return None, _add_taps(x, matrices, window, 0, 1, before)

    phases = jax.lax.scan(run_phase, None, matrices)[1]
    y = phases.swapaxes(0, 1).reshape(-1, outputs)
    return y if bias is None else y + bias


def run_blocks(
    blocks: Sequence[Sequence[Sequence[Half]]],
    activate: Callable[[Snake | None, jax.Array, Window], jax.Array],
    x: jax.Array,
    window: Window,
    dilations: Sequence[Sequence[int]],
) -> jax.Array:
    """Return the mean of the residual blocks' results for a signal [T, C].

    Loops run all blocks, their layers, a layer's two halves and a convolution's taps, so that each is compiled once:
    unrolled, published vocoders would keep a TPU's compiler busy for over ten minutes. Convolutions of fewer taps than
    the longest have zeros around theirs.

    Args:
        blocks: The two halves of each layer of each block. The convolution of the first half is dilated.
        activate: Activates a signal with the weights of a half.
        x: The signal.
        window: Its window.
        dilations: The dilation of each layer of each block.
    """
    taps = max(block[0][0][0].weight.shape[2] for block in blocks)
    farthest = max(max(row) for row in dilations) * (taps // 2)
    stacked = _stack(
        [
            _stack(
                [_stack([(_by_tap(_lengthen(convolution, taps)), act) for convolution, act in row]) for row in block]
            )
            for block in blocks
        ]
    )

    def run_half(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        (convolution, snake), dilation = inputs
        x = activate(snake, x, window)
        return _convolve_dilated(convolution, x, window, dilation, taps // 2, farthest), None

    def run_layer(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        return x + jax.lax.scan(run_half, x, inputs)[0], None

    def run_block(total: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        return total + jax.lax.scan(run_layer, x, inputs)[0], None

    padded_dilations = jnp.array([[(dilation, 1) for dilation in row] for row in dilations])
    return jax.lax.scan(run_block, jnp.zeros_like(x), (stacked, padded_dilations))[0] / len(blocks)


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _lengthen(convolution: Convolution, taps: int) -> Convolution:
    """Return the same convolution with more taps."""
    missing = taps - convolution.weight.shape[2]
    longer = jnp.pad(convolution.weight, ((0, 0), (0, 0), (missing // 2, missing - missing // 2)))
    return convolution._replace(weight=longer)


def _by_tap(convolution: Convolution) -> Convolution:
    """Return a convolution with a matrix [O, I] for each tap as its weight, which is how a TPU stores it anyway."""
    return convolution._replace(weight=convolution.weight.transpose(2, 0, 1))


def _normalise(weight: jax.Array, gain: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Return the factors that give the weight's rows the norm `gain`."""
    return gain.reshape(-1) * jax.lax.rsqrt(jnp.sum(jnp.square(weight), axes))


def _convolve_dilated(
    convolution: Convolution,
    x: jax.Array,
    window: Window,
    dilation: jax.Array | int,
    before: int,
    farthest: int | None = None,
) -> jax.Array:
    """Convolve a signal [T, I] with a convolution that has a matrix for each tap; as `_add_taps`."""
    matrices, bias, gain = convolution
    y = _add_taps(x, matrices, window, 1, dilation, before, farthest)
    if gain is not None:
        y = y * _normalise(matrices, gain, (0, 2))
    return y if bias is None else y + bias


def _add_taps(
    x: jax.Array,
    matrices: jax.Array,
    window: Window,
    axis: int,
    dilation: jax.Array | int,
    before: int,
    farthest: int | None = None,
) -> jax.Array:
    """Return the sum over taps k of x[t + (k - before) dilation] times a matrix, with zeros around x [T, I].

    Args:
        x, matrices, window: The signal, a matrix for each tap, and the signal's window.
        axis: The axis of a matrix that the signal's channels are multiplied with.
        dilation, before: As above.
        farthest: The farthest that a tap is, in rows; needed if the dilation isn't known to the compiler.
    """
    if farthest is None:
        farthest = max(before, len(matrices) - 1 - before)
    around = jnp.pad(window.silence_outside(x), ((farthest, farthest), (0, 0)))

    def add_tap(total: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        tap, matrix = inputs
        rows = jax.lax.dynamic_slice_in_dim(around, farthest + (tap - before) * dilation, len(x))
        return total + jax.lax.dot_general(rows, matrix, (((1,), (axis,)), ((), ())), precision=EXACT), None

    start = jnp.zeros((len(x), matrices.shape[2 - axis]), x.dtype)
    return jax.lax.scan(add_tap, start, (jnp.arange(len(matrices)), matrices))[0]


def activate_antialiased(snake: Snake, x: jax.Array, window: Window) -> jax.Array:
    """Activate a signal [T, C] at twice its rate: x + sin²(frequency x) / damping."""
    frequency, amplitude = jnp.exp(snake.frequency), 1 / (jnp.exp(snake.damping) + 1e-9)
    phases = raise_rate(x, window, snake.up, RATIO, len(snake.up) // 2 - 1)
    phases = [phase + amplitude * jnp.square(jnp.sin(phase * frequency)) for phase in phases]
    return _lower_rate(phases, window, snake.down)


def raise_rate(x: jax.Array, window: Window, taps: jax.Array, ratio: int, start: int) -> list[jax.Array]:
    """Return a signal [T, C] at `ratio` times its rate, as that many phases [T, C].

    Row m of the result is the sum over n of ratio x[n] taps[m + start - ratio n]; ends are repeated.
    """
    terms: list[list[tuple[int, int]]] = [[] for _ in range(ratio)]  # Taps and shifts of each phase.
    for phase in range(ratio):
        for tap in range(len(taps)):
            shift, remainder = divmod(phase + start - tap, ratio)
            if remainder == 0:
                terms[phase].append((tap, shift))
    shifted = _shift([x], window, {shift for phase in terms for _, shift in phase})[0]
    return [ratio * _add([taps[tap] * shifted[shift] for tap, shift in phase]) for phase in terms]


def _lower_rate(phases: list[jax.Array], window: Window, taps: jax.Array) -> jax.Array:
    """Filter a signal given by phases [T, C], and return it at the rate of one phase, [T, C]; ends are repeated."""
    ratio, before = len(phases), len(taps) // 2 + len(taps) % 2 - 1
    places = [divmod(tap - before, ratio) for tap in range(len(taps))]
    shifted = _shift(phases, window, {shift for shift, _ in places})
    return _add([taps[tap] * shifted[phase][shift] for tap, (shift, phase) in enumerate(places)])


def _add(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _shift(phases: list[jax.Array], window: Window, shifts: set[int]) -> list[dict[int, jax.Array]]:
    """Return each phase [T, C] moved by each shift: row t is row t + shift; the ends of the signal are repeated."""
    rows, before, after = len(phases[0]), max(0, -min(shifts)), max(0, max(shifts))
    phases = [window.repeat_ends(phase, phases[0], phases[-1]) for phase in phases]
    first, last = phases[0][:1], phases[-1][-1:]
    parts = []
    for phase in phases:
        longer = jnp.concatenate([jnp.repeat(first, before, 0), phase, jnp.repeat(last, after, 0)])
        parts.append({shift: longer[before + shift : before + shift + rows] for shift in shifts})
    return parts
