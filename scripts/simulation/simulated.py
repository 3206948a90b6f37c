"""A host that computes nothing: it waits for the planned seconds of each stage and returns payloads of real sizes.

Its videos are black mp4s, which can be continued, joined and streamed like real ones.

With it the orchestration can be measured alone: pools, replicas, pipeline, Serve and object store are those of
production, `PipelineSettings.host_class` names this class, `checkpoint` a `Planned` file, and the pipeline's model is
`MODEL`. It imports neither JAX nor torch.

Values record their history, so that a request that gets another's payload, or one out of order, fails: latents are
filled with the request's seed, a state knows its step, and a text embedding knows its prompt.
"""

import dataclasses
import functools
import json
import time
import zlib
from pathlib import Path

import numpy as np

from actors.slices.fragments import FragmentQueues
from actors.slices.messages import HostProgress, Report
from actors.slices.payloads import BFLOAT16, Payload, TextEmbedding, Value, mp4, pack, unpack
from cluster.gang.protocol import Output, report
from wan_tpu.data import DenoiseState, ImageCondition
from wan_tpu.errors import InvalidInput, InvalidRequest
from wan_tpu.families.wan.published import PUBLISHED
from wan_tpu.families.wan.spec import WanSpec
from wan_tpu.media.boxes import FREE, make_box
from wan_tpu.media.mp4 import Mp4
from wan_tpu.plan import DECODER, ENCODER, PromptText, RequestPlan
from wan_tpu.request import GenerationRequest, ResolvedRequest

SIMULATED_HOST = f"{__name__}:SimulatedHost"


class SimulatedSpec(WanSpec):
    """The shapes and experts of a model that needs an image; here a request may come without."""

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        """Both."""
        return "i2v", "t2v"


MODEL = SimulatedSpec(PUBLISHED["wan2.2-i2v-a14b"])


@dataclasses.dataclass(frozen=True)
class Planned:
    """The durations and results of simulated stages; by default those of A14B at 720p on v6e-8.

    Attributes:
        text_s: Seconds for a prompt (docs/benchmarks.md and docs/performance.md).
        image_s: Seconds for an image.
        step_s: Seconds for a denoising step.
        decode_s: Seconds for a video.
        text: The shape of a prompt's embeddings, bfloat16 [1, L, C].
        mp4_bytes: The size of a video, unless its black frames need more.
        speed: Durations are divided by it, sizes are not.
    """

    text_s: float = 0.024
    image_s: float = 0.35
    step_s: float = 2.67
    decode_s: float = 0.35
    text: tuple[int, int, int] = (1, 512, 4096)
    mp4_bytes: int = 2_000_000
    speed: float = 1.0

    def save(self, path: Path) -> Path:
        """Write the plan to where hosts can read it; return the path."""
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> "Planned":
        """Read a plan that `save` wrote; raises `InvalidInput`."""
        try:
            fields = json.loads(path.read_text())
            return cls(**fields | {"text": tuple(fields["text"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} is no plan of a simulation ({error}); Planned().save makes one") from None

    def seconds(self, stage: str, request: ResolvedRequest) -> float:
        """Return how long a request keeps a slice of that stage."""
        if stage == ENCODER:
            image = 0.0 if request.image is None else self.image_s
            return (len(MODEL.prompts(request)) * self.text_s + image) / self.speed
        if stage == DECODER:
            return self.decode_s / self.speed
        return sum(e.stop - e.start for e in MODEL.experts(request) if e.stage == stage) * self.step_s / self.speed


@dataclasses.dataclass
class _Work:
    """A request's inputs, copied out of the object store as if onto devices, and its progress."""

    request: ResolvedRequest
    arrays: list[np.ndarray]
    step: int = 0
    plan: RequestPlan | None = None  # of one that is to be denoised


class SimulatedHost:
    """Has the methods of `actors.slices.stage_host.StageHost`; a test compares them."""

    def __init__(self, checkpoint: str, hosted: tuple[str, ...], *_: object, report: Report = report) -> None:
        """checkpoint: the file of a plan; the other arguments of a host change nothing here."""
        self._planned = Planned.load(Path(checkpoint))
        self._stages = hosted
        self._report = report
        self._work: dict[str, _Work] = {}
        self._fragments = FragmentQueues()

    def software(self) -> dict[str, str]:
        """Return nothing: nothing is computed."""
        return {}

    # ---- in lockstep

    def load(self) -> None:
        """Return at once: there are no weights."""
        self._report(HostProgress("load", 1, 1))

    def warm_up(self, request: GenerationRequest) -> None:
        """Encode the video of this size; there are no programs."""
        resolved = MODEL.plan(request).request
        _encode_black(resolved.height, resolved.width, resolved.frames, resolved.fps)

    def encode_text(self, prompt: PromptText, adapted: RequestPlan | None = None) -> Output:
        """Wait for one prompt's seconds: ((0, no warnings), `TextEmbedding`)."""
        with self._lasting(self._planned.text_s):
            values = {"text": np.full(self._planned.text, _mark(prompt.text), BFLOAT16)}
        return Output((0.0, []), pack(TextEmbedding(values)))

    def encode_image(self, key: str) -> Output:
        """Wait for an image's seconds: ((0, no warnings), `ImageCondition`)."""
        request = self._work.pop(key).request
        with self._lasting(self._planned.image_s):
            _, channels, *rest = MODEL.latent_shape(request)
            condition = np.full((1, 4 + channels, *rest), _mark_seed(request), np.float32)
        return Output((0.0, []), pack(ImageCondition(None, condition)))

    def begin(self, key: str) -> tuple[float]:
        """Check that the next step is to run here; no time is spent compiling."""
        work = self._work[key]
        assert work.plan is not None
        expert = work.plan.expert_at(work.step)
        if expert.stage not in self._stages:
            raise InvalidRequest(f"{expert.stage} is not hosted here ({', '.join(self._stages)})")
        return (0.0,)

    def step(self, key: str) -> tuple[float, int]:
        """Wait for a step's seconds: (0, how many are done)."""
        work = self._work[key]
        with self._lasting(self._planned.step_s):
            self.begin(key)  # refuses a step of another pool's
        work.step += 1
        return 0.0, work.step

    def decode(self, key: str) -> Output:
        """Wait for a video's seconds: ((0, no warnings), `EncodedVideo`), a black one whose bytes end with a label."""
        work = self._work.pop(key)
        with self._lasting(self._planned.decode_s):
            request = work.request
            shape = request.height, request.width, request.frames - request.hidden_frames
            content, fragments = _encode_black(*shape, request.fps)
            content = _label(content, simulated_video(request), self._planned.mp4_bytes)
            with self._fragments.fill(key) as on_fragment:
                if on_fragment is not None:
                    for fragment in fragments[:-1]:
                        on_fragment(fragment)
                    on_fragment(_label(fragments[-1], simulated_video(request)))
        return Output((0.0, []), pack(mp4(content, np.zeros((*shape[:2], 3), np.uint8))))

    # ---- beside the lockstep

    def check_adapters(self, plan: RequestPlan) -> None:
        """Find nothing wrong."""

    def fetch_text_adapters(self, plan: RequestPlan) -> None:
        """Return at once: there are no weights to apply adapters to."""

    def fetch_adapters(self, plan: RequestPlan) -> list[str]:
        """Return no warnings: there are no weights to apply adapters to."""
        return []

    def prepare_encode(self, key: str, request: ResolvedRequest) -> int:
        """Hold what the encoder needs; return the bytes of the pixels."""
        self._work[key] = _Work(request, [])
        return 3 * 4 * request.height * request.width

    def prepare_denoise(
        self,
        key: str,
        plan: RequestPlan,
        prompt: Payload,
        negative: Payload | None = None,
        image: Payload | None = None,
        state: Payload | None = None,
        previews: bool = False,
    ) -> int:
        """Copy a request's inputs; return the bytes of all payloads. Nothing is previewed."""
        request = plan.request
        work = _Work(request, [], plan=plan)
        for text, payload in ((request.prompt, prompt), (request.negative_prompt, negative)):
            work.arrays += _check_payload(payload, TextEmbedding, _mark(text))
        work.arrays += _check_payload(image, ImageCondition, _mark_seed(request))
        if state is None:
            noise = np.full(MODEL.latent_shape(request), _mark_seed(request), np.float32)
            terms = MODEL.schedule(request).history_terms
            work.arrays += [noise, *(np.zeros_like(noise) for _ in range(terms))]
        else:
            work.arrays += _check_payload(state, DenoiseState, _mark_seed(request))
            work.step = state.step or 0
        self._work[key] = work
        return sum(payload.nbytes for payload in (prompt, negative, image, state) if payload is not None)

    def draw_ahead(self, key: str, request: ResolvedRequest) -> None:
        """Raise `InvalidRequest`: a simulated decoder takes no noise."""
        raise InvalidRequest("a simulated video's decoder takes no noise")

    def prepare_decode(
        self, key: str, request: ResolvedRequest, state: Payload, fragments: bool = False, chunk: int | None = None
    ) -> int:
        """Copy final latents; return their bytes. With `fragments`, the video's are passed on."""
        if chunk is not None:
            raise InvalidRequest("a simulated video has no chunks")
        if state.step != request.steps or state.arrays["latents"].shape != MODEL.latent_shape(request):
            raise InvalidRequest(f"the decoder was given step {state.step}; this request needs step {request.steps}")
        self._work[key] = _Work(request, _check_payload(state, DenoiseState, _mark_seed(request)), request.steps)
        if fragments:
            self._fragments.open(key)
        return state.nbytes

    def take_fragments(self, key: str) -> tuple[list[bytes], bool]:
        """Wait a while for fragments of a video; return them, and whether others may follow."""
        return self._fragments.take(key)

    def snapshot(self, key: str) -> Output:
        """Copy out the state: (step, `DenoiseState`)."""
        return self._state(self._work[key], history=True)

    def copy_chunk(self, key: str, chunk: int) -> Output:
        """Raise `InvalidRequest`: a simulated video has no chunks."""
        raise InvalidRequest("a simulated video has no chunks")

    def collect(self, key: str) -> Output:
        """Copy out the state and let go of it: (step, `DenoiseState`), after the last step without history."""
        work = self._work.pop(key)
        return self._state(work, history=work.step < work.request.steps)

    def drop(self, key: str) -> None:
        """Let go of a request, if it is here."""
        self._work.pop(key, None)
        self._fragments.drop(key)

    def list_keys(self) -> list[str]:
        """Return the requests that are held here."""
        return sorted({*self._work, *self._fragments.list_keys()})

    def start_profile(self, run: str) -> None:
        """Raise `InvalidRequest`: nothing is computed."""
        raise InvalidRequest("a simulated slice computes nothing that could be traced")

    def cancel_profile(self, run: str) -> None:
        """Return at once: none can be under way."""

    def stop_profile(self, output: str, run: str) -> int:
        """Raise `InvalidRequest`, as `start_profile`."""
        raise InvalidRequest("a simulated slice computes nothing that could be traced")

    # ----

    def _lasting(self, seconds: float) -> "_Lasting":
        return _Lasting(seconds / self._planned.speed)

    def _state(self, work: _Work, *, history: bool) -> Output:
        terms = MODEL.schedule(work.request).history_terms
        arrays = work.arrays[-1 - terms :]
        return Output(work.step, pack(DenoiseState(arrays[0], tuple(arrays[1:]) if history else (), work.step)))


class _Lasting:
    """Makes a block last that long, including the work done in it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        time.sleep(max(0.0, self._end - time.perf_counter()))


def simulated_video(request: GenerationRequest) -> bytes:
    """Return how the bytes of a request's simulated video end, as a file and as a stream."""
    return f"simulated: {request.prompt}, seed {request.seed}".encode()


@functools.lru_cache(maxsize=8)
def _encode_black(height: int, width: int, frames: int, fps: float) -> tuple[bytes, tuple[bytes, ...]]:
    """Return a black mp4 and its fragments. Encoding takes long, so requests of one size share them."""
    fragments: list[bytes] = []
    with Mp4(fps, fragments.append) as video:
        for _ in range(frames):
            video.add(np.zeros((1, 3, height, width), np.uint8))
        video.finish()
        if video.failure is not None:
            raise video.failure
    return video.content, tuple(fragments)


def _label(content: bytes, label: bytes, size: int = 0) -> bytes:
    """Return an mp4 or a fragment of at least `size` bytes that ends with a label, in a box that players skip."""
    padding = max(0, size - len(content) - len(FREE) - len(label))
    return content + make_box(b"free", bytes(padding), label)


def _check_payload(payload: Payload | None, kind: type[Value], mark: float) -> list[np.ndarray]:
    """Return copies of a payload's arrays; raises `InvalidInput` when it isn't what `mark` says."""
    if payload is None:
        return []
    value = unpack(payload)
    name, first = next(iter(payload.arrays.items()))
    array = first.view(BFLOAT16) if name in payload.bfloat16 else first
    if not isinstance(value, kind) or float(array.flat[0]) != mark:
        raise InvalidInput(f"{payload.kind} marked {array.flat[0]} was given, {kind.__name__} marked {mark:g} expected")
    return [np.array(array) for array in payload.arrays.values()]  # the copy onto the devices


def _mark_seed(request: ResolvedRequest) -> float:
    return float(request.seed % 2**24)  # exact in float32


def _mark(prompt: str | None) -> float:
    return float(zlib.crc32((prompt or "").encode()) % 251)  # exact in bfloat16
