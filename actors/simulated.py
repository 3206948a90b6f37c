"""A host that computes nothing: it waits for the planned seconds of each stage and hands out payloads of real sizes.

With it the orchestration can be measured alone: pools, replicas, pipeline, Serve and object store are those of
production, `PipelineSettings.host` names this class and `checkpoint` a `Planned` file. It imports neither JAX nor
torch.

Values tell what has happened to them, so that a request that is given another's payload, or one out of order, fails:
latents are filled with the request's seed, a state knows its step, a text embedding its prompt.
"""

import dataclasses
import json
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from actors.host_values import HostProgress, HostSettings, Plan, Report, StepDone
from actors.payloads import BFLOAT16, Payload, TextEmbedding, Value, mp4, pack, unpack
from cluster.gang import Output, report
from wan_tpu.data import DenoiseState, ImageCondition
from wan_tpu.errors import InvalidInput, InvalidRequest, UnhealthyResult
from wan_tpu.expert import Expert
from wan_tpu.request import Defaults, GenerationRequest, ResolvedRequest
from wan_tpu.solvers import solver_table

SIMULATED_HOST = "actors.simulated:SimulatedHost"
WAN = Defaults(height=720, width=1280, frames=81, fps=16, steps=40, guidance_scale=3.5, guidance_scale_2=3.5, shift=5.0)
BOUNDARY = 0.9  # of Wan 2.2 I2V A14B: steps with t >= 900 are the high-noise expert's


@dataclasses.dataclass(frozen=True)
class Planned:
    """What stages take and hand out; seconds as on the chips that are simulated. Left out: A14B at 720p on v6e-8.

    text_s, image_s, step_s, decode_s  a prompt, an image, a denoising step, a video: docs/benchmarks.md and
                                       docs/performance.md
    text         shape of a prompt's embeddings, bfloat16 [1, L, C]
    mp4_bytes    of a video
    speed        durations are divided by it, bytes are not
    """

    text_s: float = 0.024
    image_s: float = 0.35
    step_s: float = 2.79
    decode_s: float = 0.35
    text: tuple[int, int, int] = (1, 512, 4096)
    mp4_bytes: int = 2_000_000
    speed: float = 1.0

    def save(self, path: Path) -> Path:
        """Write it where hosts can read it; return the path."""
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> "Planned":
        """Read what `save` wrote. Raises `InvalidInput`."""
        try:
            found = json.loads(path.read_text())
            return cls(**found | {"text": tuple(found["text"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} is no plan of a simulation ({error}); Planned().save makes one") from None

    def seconds(self, stage: str, request: ResolvedRequest) -> float:
        """Return how long a request keeps a slice of that stage."""
        if stage == "encoder":
            image = 0.0 if request.image is None else self.image_s
            return (len(_prompts(request)) * self.text_s + image) / self.speed
        if stage == "decoder":
            return self.decode_s / self.speed
        return sum(e.stop - e.start for e in _experts(request) if e.stage == stage) * self.step_s / self.speed


@dataclasses.dataclass
class _Held:
    """A request's inputs, copied out of the object store as onto devices, and how far it is."""

    request: ResolvedRequest
    arrays: list[np.ndarray]
    step: int = 0


class SimulatedHost:
    """Has the methods of `actors.host.StageHost`; a test compares them."""

    def __init__(self, settings: HostSettings, report: Report = report) -> None:
        self._planned = Planned.load(Path(settings.checkpoint))
        self._stages = settings.stages
        self._report = report
        self._held: dict[str, _Held] = {}
        self._shapes: set[str] = set()

    # ---- in lockstep

    def load(self) -> dict[str, float]:
        """Return at once: there are no weights."""
        self._report(HostProgress("load", 1, 1))
        return {}

    def warm_up(self, request: GenerationRequest) -> dict[str, float]:
        """Return at once: there are no programs."""
        self._shapes |= set(self.plan(request).shapes.values())
        return {}

    def encode_text(self, prompt: str) -> Output:
        """Wait for one prompt's seconds: (no warnings, `TextEmbedding`)."""
        with self._lasting(self._planned.text_s):
            values = np.full(self._planned.text, _mark(prompt), BFLOAT16)
        return Output([], pack(TextEmbedding(values)))

    def encode_image(self, key: str) -> Output:
        """Wait for an image's seconds: (seconds, `ImageCondition`)."""
        request = self._held.pop(key).request
        with self._lasting(self._planned.image_s):
            _, channels, *rest = _latents(request)
            condition = np.full((1, 4 + channels, *rest), request.seed, np.float32)
        return Output(self._planned.image_s / self._planned.speed, pack(ImageCondition(None, condition)))

    def begin(self, key: str) -> Expert:
        """Return which steps are to run."""
        held = self._held[key]
        expert = next(e for e in _experts(held.request) if e.start <= held.step < e.stop)
        if expert.stage not in self._stages:
            raise InvalidRequest(f"{expert.stage} is not hosted here ({', '.join(self._stages)})")
        return expert

    def step(self, keys: Sequence[str]) -> list[StepDone | UnhealthyResult]:
        """Wait for a step's seconds of each: what requests share of a step, reading the weights, is little of it."""
        start = time.perf_counter()
        with self._lasting(self._planned.step_s * len(keys)):
            experts = [self.begin(key) for key in keys]
            kinds = {(e.stage, _latents(self._held[key].request)) for e, key in zip(experts, keys, strict=True)}
            if len(kinds) > 1:
                raise InvalidRequest("requests of different experts or shapes can't be stepped together")
        seconds, done = time.perf_counter() - start, list[StepDone | UnhealthyResult]()
        for expert, held in zip(experts, (self._held[key] for key in keys), strict=True):
            held.step += 1
            done.append(StepDone(expert.stage, held.step, held.request.steps, 0.0, seconds))
        return done

    def decode(self, key: str) -> Output:
        """Wait for a video's seconds: (seconds, `EncodedVideo`), whose bytes say that they are none."""
        held = self._held.pop(key)
        with self._lasting(self._planned.decode_s):
            label = simulated_video(held.request)
            content = label + b"\0" * (self._planned.mp4_bytes - len(label))
        return Output(self._planned.decode_s / self._planned.speed, pack(mp4(content)))

    # ---- on the side

    def plan(self, request: GenerationRequest) -> Plan:
        """Return what a request takes of Wan 2.2 A14B."""
        resolved = request.resolve(WAN)
        size = f"{resolved.height}x{resolved.width}"
        experts = _experts(resolved)
        named = {expert.stage: f"{expert.stage} {size}x{resolved.frames} simulated" for expert in experts}
        ends = {"encoder": f"encoder {size} simulated", "decoder": f"decoder {size} simulated"}
        return Plan(resolved, _prompts(resolved), experts, ends | named)

    def prepare_encode(self, key: str, request: ResolvedRequest) -> int:
        """Hold what the encoder needs; return the bytes of the pixels."""
        self._held[key] = _Held(request, [])
        return 3 * 4 * request.height * request.width

    def prepare_denoise(
        self,
        key: str,
        request: ResolvedRequest,
        prompt: Payload,
        negative: Payload | None = None,
        image: Payload | None = None,
        state: Payload | None = None,
    ) -> int:
        """Copy a request's inputs; return the bytes of all payloads."""
        held = _Held(request, [])
        for text, given in ((request.prompt, prompt), (request.negative_prompt, negative)):
            held.arrays += _checked(given, TextEmbedding, _mark(text))
        held.arrays += _checked(image, ImageCondition, request.seed)
        if state is None:
            noise = np.full(_latents(request), request.seed, np.float32)
            terms = solver_table(request.solver, request.steps, request.shift).history_terms
            held.arrays += [noise, *(np.zeros_like(noise) for _ in range(terms))]
        else:
            held.arrays += _checked(state, DenoiseState, request.seed)
            held.step = state.step or 0
        self._held[key] = held
        return sum(given.nbytes for given in (prompt, negative, image, state) if given is not None)

    def prepare_decode(self, key: str, request: ResolvedRequest, state: Payload) -> int:
        """Copy final latents; return their bytes."""
        if state.step != request.steps or state.arrays["latents"].shape != _latents(request):
            raise InvalidRequest(f"the decoder was given step {state.step}; this request needs step {request.steps}")
        self._held[key] = _Held(request, _checked(state, DenoiseState, request.seed), request.steps)
        return state.nbytes

    def snapshot(self, key: str) -> Output:
        """Copy out the state: (step, `DenoiseState`)."""
        return self._state(self._held[key], history=True)

    def collect(self, key: str) -> Output:
        """Copy out the state and let go of it: (step, `DenoiseState`), after the last step without history."""
        held = self._held.pop(key)
        return self._state(held, history=held.step < held.request.steps)

    def drop(self, key: str) -> None:
        """Let go of a request, if it is here."""
        self._held.pop(key, None)

    def shapes(self) -> list[str]:
        """Return the shapes that were warmed up."""
        return sorted(self._shapes)

    def compiled(self) -> dict[str, float]:
        """Return nothing: there are no programs."""
        return {}

    def keys(self) -> list[str]:
        """Return the requests that are held here."""
        return sorted(self._held)

    # ----

    def _lasting(self, seconds: float) -> "_Lasting":
        return _Lasting(seconds / self._planned.speed)

    def _state(self, held: _Held, *, history: bool) -> Output:
        terms = solver_table(held.request.solver, held.request.steps, held.request.shift).history_terms
        arrays = held.arrays[-1 - terms :]
        return Output(held.step, pack(DenoiseState(arrays[0], tuple(arrays[1:]) if history else (), held.step)))


class _Lasting:
    """Makes a block last so long, what is done in it included."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        time.sleep(max(0.0, self._end - time.perf_counter()))


def simulated_video(request: GenerationRequest) -> bytes:
    """Return how the bytes of a request's simulated video begin."""
    return f"simulated, no video: {request.prompt}, seed {request.seed}".encode()


def _checked(payload: Payload | None, kind: type[Value], mark: float) -> list[np.ndarray]:
    """Return copies of a payload's arrays; raises `InvalidInput` when it isn't what `mark` says."""
    if payload is None:
        return []
    value = unpack(payload)
    name, first = next(iter(payload.arrays.items()))
    found = first.view(BFLOAT16) if name in payload.bfloat16 else first
    if not isinstance(value, kind) or float(found.flat[0]) != mark:
        raise InvalidInput(f"{payload.kind} marked {found.flat[0]} was given, {kind.__name__} marked {mark:g} expected")
    return [np.array(array) for array in payload.arrays.values()]  # the copy onto the devices


def _mark(prompt: str | None) -> float:
    return float(zlib.crc32((prompt or "").encode()) % 251)  # exact in bfloat16


def _prompts(request: ResolvedRequest) -> tuple[str, ...]:
    guided = request.guidance_scale > 1 or request.guidance_scale_2 > 1
    return (request.prompt, request.negative_prompt) if guided else (request.prompt,)


def _experts(request: ResolvedRequest) -> tuple[Expert, ...]:
    boundary = solver_table(request.solver, request.steps, request.shift).high_noise_steps(BOUNDARY)
    both = (
        Expert("denoise_high", 0, boundary, request.guidance_scale),
        Expert("denoise_low", boundary, request.steps, request.guidance_scale_2),
    )
    return tuple(expert for expert in both if expert.start < expert.stop)


def _latents(request: ResolvedRequest) -> tuple[int, ...]:
    """Return the shape of the latents, [1, C=16, T, H, W]."""
    return 1, 16, (request.frames - 1) // 4 + 1, request.height // 8, request.width // 8
