"""A stand-in for a gang of TPU hosts. Calls take time and fail on demand; results are digests of their inputs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ray.exceptions import ObjectLostError

from actors.slices.payloads import TextEmbedding, mp4, pack, unpack
from cluster.errors import CallFailed, DeviceFailed, SliceLost
from cluster.gang.protocol import LANES, HostPlace, Output, Timeouts
from cluster.gang.slice import Returned
from tests.actors.simulation.ray_objects import Object
from tests.actors.simulation.submissions import MODEL
from tests.actors.simulation.virtual_time import Lane, Waiting
from tests.actors.simulation.world import CALL_S, COPY_S, Process, World, array, digest
from wan_tpu.data import DenoiseState, ImageCondition
from wan_tpu.errors import InvalidRequest, OutputError, Unavailable, UnhealthyResult
from wan_tpu.plan import PromptText, RequestPlan
from wan_tpu.request import ResolvedRequest


class Host:
    """A stand-in for `StageHost` that computes nothing: results are digests of their inputs."""

    def __init__(self, world: World, slice_: "Slice", stages: tuple[str, ...]) -> None:
        self._world, self._slice, self._stages = world, slice_, stages
        self.requests: dict[str, Any] = {}
        self.fragments: dict[str, list[bytes]] = {}
        self.open_videos: dict[str, list[bytes]] = {}
        self.noises: dict[str, bytes] = {}
        self.painted: dict[str, list[tuple[int, bytes]] | None] = {}  # None where no previews are wanted.

    def load(self) -> None:
        """Do nothing, as there are no weights to read."""

    def encode_text(self, prompt: PromptText) -> Output:
        embedding = TextEmbedding({"text": array(digest("text", prompt.text))})
        return Output((0.0, [], seconds_of(prompt.text)), pack(embedding))

    def prepare_encode(self, key: str, request: ResolvedRequest) -> int:
        self.requests[key] = request
        return 1

    def encode_image(self, key: str) -> Output:
        request = self.requests.pop(key)
        read = {"text": array(digest("read", request.prompt))} if reads_image(request) else None
        return Output((0.0, []), pack(ImageCondition(None, array(digest("image", request.seed)), prompt=read)))

    def check_adapters(self, plan: RequestPlan) -> None:
        pass

    def fetch_adapters(self, plan: RequestPlan) -> list[str]:
        if self._world.hub_is_down:
            raise Unavailable("the hub doesn't answer")
        return []

    def prepare_denoise(
        self,
        key: str,
        plan: RequestPlan,
        prompt: Any,
        negative: Any = None,
        image: Any = None,
        state: Any = None,
        previews: bool = False,
    ) -> int:
        self.painted[key] = [] if previews else None
        if plan.request.prompt.startswith("bad"):
            raise InvalidRequest("the request asks for what nobody can make")
        assert prompt or any(name.startswith("prompt.") for name in image.arrays), "a prompt that nobody has encoded"
        inputs = b"".join(
            payload.arrays[name].tobytes()
            for payload in (prompt, negative, image)
            if payload
            for name in payload.arrays
        )
        latents, step, chunks = digest("noise", plan.request.seed, plan.request.frames), plan.first_step, ()
        if state is not None:
            latents, step = state.arrays["latents"].tobytes(), state.step
            chunks = unpack(state).chunks
        self.requests[key] = [plan, inputs, latents, step, tuple(chunk.tobytes() for chunk in chunks)]
        return 1

    def begin(self, key: str) -> tuple[float]:
        plan, _, _, step, _ = self.requests[key]
        assert plan.expert_at(step).stage in self._stages
        return (0.0,)

    def step(self, key: str) -> tuple[Any, ...]:
        plan, inputs, latents, step, chunks = self.requests[key]
        assert plan.expert_at(step).stage in self._stages, "a step of another pool's expert"
        request_id = key.rpartition(" ")[0]
        if plan.request.prompt.startswith("nan") and step == plan.request.steps - 1:
            raise UnhealthyResult("the step gave NaN")
        latents, step = digest(latents, inputs, step), step + 1
        if len(plan.chunk_stops) > 1 and step in plan.chunk_stops:
            chunks = (*chunks, latents)
        self.requests[key][2:] = latents, step, chunks
        self._world.steps[request_id].append((step, self._world.loop.now, self._slice.name))
        painted = self.painted.get(key)
        ready = [] if not painted else [painted.pop()]
        if painted is not None and step in plan.preview_steps:
            painted.append((step, latents))  # It is there after the next step.
        return 0.0, step, *ready

    def snapshot(self, key: str) -> Output:
        return self._state(self.requests[key])

    def copy_chunk(self, key: str, chunk: int) -> Output:
        plan, _, _, _, chunks = self.requests[key]
        stop = plan.chunk_stops[chunk]
        return Output(stop, pack(DenoiseState(array(chunks[chunk]), (), stop)))

    def collect(self, key: str) -> Output:
        return self._state(self.requests.pop(key))

    @staticmethod
    def _state(work: list[Any]) -> Output:
        _, _, latents, step, chunks = work
        return Output(step, pack(DenoiseState(array(latents), (), step, chunks=tuple(map(array, chunks)))))

    def draw_ahead(self, key: str, request: ResolvedRequest) -> None:
        self.noises[key] = digest("decoder's noise", request.seed)

    def prepare_decode(
        self, key: str, request: ResolvedRequest, state: Any, fragments: bool = False, chunk: int | None = None
    ) -> int:
        if chunk is None:
            assert state.step == request.steps, "latents that aren't finished"
            decoded = [array.tobytes() for array in unpack(state).chunks or (unpack(state).latents,)]
        else:
            open_video = self.open_videos.setdefault(key, [])
            assert len(open_video) == chunk, "a chunk that isn't next"
            open_video.append(state.arrays["latents"].tobytes())
            decoded = open_video
        is_last = state.step == request.steps
        noise = self.noises.pop(key, None)
        assert noise in (None, digest("decoder's noise", request.seed)), "another request's noise"
        self._world.drawn_ahead[key.rpartition(" ")[0]] += noise is not None
        self.requests[key] = request, decoded, is_last
        if fragments:
            ready = fragments_of(request, decoded)
            before = 0 if chunk is None or chunk == 0 else len(fragments_of(request, decoded[:-1]))
            self.fragments.setdefault(key, []).extend(ready[before:])
        return 1

    def take_fragments(self, key: str) -> tuple[list[bytes], bool]:
        left = self.fragments.get(key, [])
        first, left[:1] = left[:1], []
        may_follow = bool(left) or key in self.requests
        if not may_follow:
            self.fragments.pop(key, None)
        return first, may_follow

    def decode(self, key: str) -> Output:
        request, decoded, is_last = self.requests.pop(key)
        if self._slice.is_sick:
            raise OutputError("no space is left on the disk of this host")
        if request.prompt.startswith("dark"):
            raise UnhealthyResult("the frames are NaN")
        request_id = key.rpartition(" ")[0]
        self._world.decoded[request_id].append((len(decoded), self._world.loop.now, self._slice.name))
        if not is_last:
            return Output((0.0, []), None)
        self.open_videos.pop(key, None)
        return Output((0.0, []), pack(mp4(b"".join(fragments_of(request, decoded)))))

    def drop(self, key: str) -> None:
        self.requests.pop(key, None)
        self.fragments.pop(key, None)
        self.open_videos.pop(key, None)
        self.noises.pop(key, None)

    def list_keys(self) -> list[str]:
        return sorted({*self.requests, *self.noises, *self.fragments, *self.open_videos})


def fragments_of(request: ResolvedRequest, chunks: Sequence[bytes]) -> list[bytes]:
    """Return the fragments of a video, which depend on the latents of its chunks."""
    content = b"".join(digest("video", request.seed, latents) for latents in chunks)
    return [content[start : start + 4] for start in range(0, len(content), 4)]


def seconds_of(prompt: str) -> float:
    """Return how long the model finds a prompt's video to be."""
    return 1.0 + digest("seconds", prompt)[0] / 64


def reads_image(request: ResolvedRequest) -> bool:
    """Return whether the text encoder reads a request's image together with its prompt."""
    return request.image is not None and request.guidance_scale <= 1


def expected_fragments(plan: RequestPlan) -> list[bytes]:
    """Return the fragments that a request must produce, wherever and however often its parts are computed."""
    request = plan.request
    if plan.has_open_length:
        request = MODEL.set_length(plan, seconds_of(request.prompt)).request
    inputs = b"".join(digest("text", prompt) for prompt in plan.prompts)
    if request.image is not None or request.video is not None:
        inputs += digest("image", request.seed)
    if reads_image(request):
        inputs += digest("read", request.prompt)
    latents, chunks = digest("noise", request.seed, request.frames), []
    for step in range(plan.first_step, request.steps):
        latents = digest(latents, inputs, step)
        if step + 1 in plan.chunk_stops:
            chunks.append(latents)
    return fragments_of(request, chunks)


def video_of(plan: RequestPlan) -> bytes:
    """Return the video that a request must produce."""
    return b"".join(expected_fragments(plan))


class Slice:
    """A leader's gang of hosts. The world determines how long calls take and when they fail."""

    emulated = False

    def __init__(
        self, world: World, process: Process, name: str, stages: tuple[str, ...], timeouts: Timeouts, host: Any = None
    ) -> None:
        self.world, self.process, self.name, self.timeouts = world, process, name, timeouts
        self.hosts = (HostPlace(0, 1, name, name, "10.0.0.1"),)
        self.software: dict[str, str] = {}
        self.start_s = {"placed": 0.0}
        self.host = host or Host(world, self, stages)
        self.is_sick = False
        self.next_fault: str | None = None  # The fault of the next lockstep call: "device" or "hang".
        self.on_loss: Callable[[str], object] = lambda why: None  # Called before the hosts lose what they hold.
        self._lost: SliceLost | None = None
        self._waiting = Waiting(world.loop)
        self._lanes = {lane: Lane(world.loop) for lane in LANES}

    @property
    def is_lost(self) -> bool:
        """Whether the gang was destroyed."""
        return self._lost is not None

    def describe(self) -> str:
        return self.name

    def call(
        self,
        method: str,
        *args: Any,
        lane: str = "lockstep",
        timeout_s: float | None = None,
        on_progress: Any = None,
    ) -> Returned:
        world = self.world
        with self._lanes[lane]:
            self._check()
            planned = world.seconds.get(method, COPY_S)
            seconds = planned(self.host.requests, *args) if callable(planned) else planned
            if method in ("check_adapters", "fetch_adapters"):
                seconds = 15.0 if world.hub_is_down else 1.0
            if lane == "lockstep" and self.next_fault is not None:
                fault, self.next_fault = self.next_fault, None
                world.tell(f"{self.name}: {method} meets a fault of its devices: {fault}")
                fault_s = seconds if fault == "device" else timeout_s or 1.0
                world.hung_until_s = max(world.hung_until_s, world.loop.now + fault_s)
                self._waiting.wait(fault_s)
                self._check()
                raise self.lose(DeviceFailed(f"{self.name}: {method}: {fault}"))
            self._waiting.wait(seconds)
            self._check()
            values = []
            for arg in args:
                if type(arg) is Object:
                    if arg.is_lost:
                        raise CallFailed(f"{method} lost its input") from ObjectLostError("00" * 28, None, "")
                    arg = arg.value
                values.append(arg)
            try:
                output = getattr(self.host, method)(*values)
            except Exception as error:
                raise CallFailed(f"{self.name}: {method} raised on every host: {error!r}") from error
        if isinstance(output, Output):
            return Returned(output.value, Object(self.process, output.payload))  # type: ignore[arg-type]
        return Returned(output, Object(self.process, None))  # type: ignore[arg-type]

    def check(self) -> None:
        """Return if the hosts answer."""
        self.world.loop.block(CALL_S)
        self._check()

    def close(self) -> None:
        self.lose(SliceLost(f"{self.name} is closed"))

    def lose(self, why: SliceLost) -> SliceLost:
        """Destroy the gang with everything that its hosts hold; waiting callers get the error."""
        if self._lost is None:
            self._lost = why
            self.on_loss(str(why))
            if isinstance(self.host, Host):
                self.host.requests.clear()
                self.host.fragments.clear()
                self.host.open_videos.clear()
            self._waiting.wake()
        return self._lost

    def _check(self) -> None:
        self.process.check_thread()
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))


def find_drain_s(
    world: World, process: Process, deadlines: dict[str, float]
) -> Callable[[Iterable[str]], float | None]:
    """Return the function that asks Ray in how many seconds hosts are taken away. Ray may not answer for a while."""

    def find_seconds_left(nodes: Iterable[str]) -> float | None:
        world.loop.block(max(CALL_S, world.ray_is_silent_until_s - world.loop.now))
        process.check_thread()
        return min((deadlines[node] - world.loop.now for node in nodes if node in deadlines), default=None)

    return find_seconds_left
