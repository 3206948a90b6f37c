"""What stands for Ray, TPU hosts and storage in a simulated world. All of it takes time, and all of it fails on demand.

A stand-in belongs to a process of the world. When that is killed, whatever it was about to do never happens.
"""

import asyncio
import hashlib
import random
import types
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np
from ray.exceptions import ActorDiedError, ObjectLostError

from actors.observe.status_board import StatusBoard
from actors.slices.payloads import TextEmbedding, mp4, pack
from actors.slices.references import _RefStoreActor
from actors.storage.base import Missing, StorageError
from cluster.errors import CallFailed, DeviceFailed, SliceLost
from cluster.gang.protocol import HostPlace, Output, Timeouts
from cluster.gang.slice import Returned
from tests.actors.simulation.virtual_time import Lane, VirtualTime, Waiting
from wan_tpu.data import DenoiseState, ImageCondition
from wan_tpu.errors import InvalidRequest, OutputError, Unavailable, UnhealthyResult
from wan_tpu.request import ResolvedRequest
from wan_tpu.spec import RequestPlan

SECONDS = {"encode_text": 0.1, "encode_image": 0.3, "begin": 0.05, "step": 1.0, "decode": 0.5, "load": 2.0}
COPY_S = 0.02  # of what moves arrays onto devices or off them
CALL_S = 0.002  # of a message between processes


class Process:
    """Something that can be killed."""

    def __init__(self, loop: VirtualTime, name: str) -> None:
        self.loop, self.name, self.dead = loop, name, False

    def check_thread(self) -> None:
        """Never return to a thread of a process that is dead."""
        if self.dead:
            self.loop.wait_for_ever()


class World:
    """One run: its time, its chance, what has happened in it, and what doesn't work at the moment."""

    def __init__(self, loop: VirtualTime, seed: int) -> None:
        self.loop, self.random = loop, random.Random(seed)
        self.story: list[tuple[float, str]] = []
        self.steps: dict[str, list[tuple[int, float, str]]] = defaultdict(list)  # request -> step, when, slice
        self.excuses: dict[str, list[tuple[float, str]]] = defaultdict(list)  # why steps of a request may be repeated
        self.hub_is_down = False
        self.ray_is_silent_until_s = 0.0

    def tell(self, text: str) -> None:
        """Note what has happened."""
        self.story.append((self.loop.now, text))

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Have something happen."""
        self.loop.call_later(seconds, function)


def digest(*parts: object) -> bytes:
    """Return what stands for a result: it depends on everything that it was made of."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def array(content: bytes) -> np.ndarray:
    """Return bytes as an array."""
    return np.frombuffer(content, np.uint8)


class Object:
    """A reference to an object of the store, lost with the process that owns it."""

    __slots__ = ("is_evicted", "owner", "value")

    def __init__(self, owner: Process | None, value: Any) -> None:
        self.owner, self.value, self.is_evicted = owner, value, False

    @property
    def is_lost(self) -> bool:
        """Whether nobody can have it any more."""
        return self.is_evicted or (self.owner is not None and self.owner.dead)

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(CALL_S).__await__()
        if self.is_lost:
            raise ObjectLostError("00" * 28, None, "")
        return self.value


class Objects:
    """The object store, as one process uses it from its threads."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def get(self, ref: Object) -> Any:
        """Return an object."""
        self._process.loop.block(CALL_S)
        self._process.check_thread()
        if ref.is_lost:
            raise ObjectLostError("00" * 28, None, "")
        return ref.value

    def put(self, value: Any) -> Object:
        """Keep an object."""
        self._process.loop.block(CALL_S)
        self._process.check_thread()
        return Object(self._process, value)


class ActorHandle:
    """A handle to an actor: its methods return what can be awaited. It may be silent for a while, or dead."""

    def __init__(self, loop: VirtualTime, process: Process, actor: Any) -> None:
        self._loop, self._process, self._actor = loop, process, actor
        self.silent_until_s = 0.0

    def __getattr__(self, name: str) -> "_Method":
        method = _Method(self, getattr(self._actor, name, lambda: None))
        self.__dict__[name] = method
        return method


class _Method:
    __slots__ = ("_function", "_handle")

    def __init__(self, handle: ActorHandle, function: Callable[..., Any]) -> None:
        self._handle, self._function = handle, function

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        handle = self._handle
        future = handle._loop.create_future()
        wait_s = max(CALL_S, handle.silent_until_s - handle._loop.now)
        handle._loop.call_later(wait_s, self._answer, future, args)
        return future

    def _answer(self, future: asyncio.Future[Any], args: tuple[Any, ...]) -> None:
        handle = self._handle
        if handle._process.dead:
            if not future.done():
                future.set_exception(ActorDiedError())
                future.exception()  # nobody need look at it
        elif handle.silent_until_s > handle._loop.now:
            handle._loop.call_later(handle.silent_until_s - handle._loop.now, self._answer, future, args)
        else:
            result = self._function(*args)
            if not future.done():
                future.set_result(result)


class RefStoreActor(_RefStoreActor):
    """The real one, but for what Ray does in it."""

    def adopt(self, scope: int, key: str) -> None:
        there = self._scopes.get(scope, {})
        if key in there and not there[key].is_lost:
            there[key] = Object(None, there[key].value)


class Bucket:
    """Storage: slow, full, or down at times. All processes share it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.content: dict[str, bytes] = {}
        self.seconds, self.is_down, self.is_full = 0.02, False, False
        self.failures, self.was_ill = 0, False


class BucketOfProcess:
    """`Storage`, for one process."""

    def __init__(self, bucket: Bucket, process: Process) -> None:
        self._bucket, self._process = bucket, process

    def _wait(self) -> None:
        bucket = self._bucket
        self._process.loop.block(bucket.seconds * bucket.world.random.choice((0.3, 1.0, 1.0, 2.0)))
        self._process.check_thread()
        if bucket.is_down:
            bucket.failures += 1
            raise StorageError("the bucket doesn't answer")

    def location(self, name: str = "") -> str:
        return f"bucket/{name}"

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self._wait()
        if name not in self._bucket.content:
            raise Missing(f"there is no {name}")
        return self._bucket.content[name][start:stop]

    def write(self, name: str, content: bytes) -> None:
        self._wait()
        if self._bucket.is_full:
            self._bucket.failures += 1
            raise StorageError("no space is left in the bucket")
        self._bucket.content[name] = content

    def list(self, prefix: str = "") -> dict[str, int]:
        self._wait()
        return {name: len(content) for name, content in self._bucket.content.items() if name.startswith(prefix)}

    def delete(self, name: str) -> None:
        self._wait()
        self._bucket.content.pop(name, None)

    def clean(self, older_s: float) -> None:
        self._wait()

    def probe(self) -> None:
        self.write(".probe", b"")
        self.delete(".probe")


class StatusHandle(ActorHandle):
    """The status actor, as one process reports to it while that lives. It is told at once: nobody waits for it."""

    def __init__(self, board: StatusBoard, process: Process) -> None:
        super().__init__(process.loop, process, board)

    def __getattr__(self, name: str) -> Any:
        report, process = getattr(self._actor, name), self._process
        method = types.SimpleNamespace(remote=lambda *args: None if process.dead else report(*args))
        self.__dict__[name] = method
        return method


class Host:
    """What `StageHost` does, of which nothing is computed: results are digests of what went into them."""

    def __init__(self, world: World, slice_: "Slice", stages: tuple[str, ...]) -> None:
        self._world, self._slice, self._stages = world, slice_, stages
        self.held: dict[str, Any] = {}

    def load(self) -> None:
        """Nothing is read."""

    def encode_text(self, prompt: str) -> Output:
        return Output((0.0, []), pack(TextEmbedding({"text": array(digest("text", prompt))})))

    def prepare_encode(self, held: str, request: ResolvedRequest) -> int:
        self.held[held] = request
        return 1

    def encode_image(self, held: str) -> Output:
        request = self.held.pop(held)
        return Output((0.0, []), pack(ImageCondition(None, array(digest("image", request.seed)))))

    def fetch_adapters(self, plan: RequestPlan) -> None:
        if self._world.hub_is_down:
            raise Unavailable("the hub doesn't answer")

    def prepare_denoise(
        self, held: str, plan: RequestPlan, prompt: Any, negative: Any = None, image: Any = None, state: Any = None
    ) -> int:
        if plan.request.prompt.startswith("bad"):
            raise InvalidRequest("the request asks for what nobody can make")
        given = b"".join(one.arrays[name].tobytes() for one in (prompt, negative, image) if one for name in one.arrays)
        if state is None:
            latents, step = digest("noise", plan.request.seed), plan.first_step
        else:
            latents, step = state.arrays["latents"].tobytes(), state.step
        self.held[held] = [plan, given, latents, step]
        return 1

    def begin(self, held: str) -> Any:
        plan, _, _, step = self.held[held]
        expert = plan.expert_at(step)
        assert expert.stage in self._stages
        return 0.0, expert

    def step(self, held: str) -> tuple[float, int]:
        plan, given, latents, step = self.held[held]
        assert plan.expert_at(step).stage in self._stages, "a step of another pool's expert"
        key = held.rpartition(" ")[0]
        if plan.request.prompt.startswith("nan") and step == plan.request.steps - 1:
            raise UnhealthyResult("the step gave NaN")
        self.held[held][2:] = digest(latents, given, step), step + 1
        self._world.steps[key].append((step + 1, self._world.loop.now, self._slice.name))
        return 0.0, step + 1

    def snapshot(self, held: str) -> Output:
        _, _, latents, step = self.held[held]
        return Output(step, pack(DenoiseState(array(latents), (), step)))

    def collect(self, held: str) -> Output:
        _, _, latents, step = self.held.pop(held)
        return Output(step, pack(DenoiseState(array(latents), (), step)))

    def prepare_decode(self, held: str, request: ResolvedRequest, state: Any) -> int:
        assert state.step == request.steps, "latents that aren't finished"
        self.held[held] = request, state.arrays["latents"].tobytes()
        return 1

    def decode(self, held: str) -> Output:
        request, latents = self.held.pop(held)
        if self._slice.is_sick:
            raise OutputError("no space is left on the disk of this host")
        return Output((0.0, []), pack(mp4(digest("video", request.seed, latents))))

    def drop(self, held: str) -> None:
        self.held.pop(held, None)

    def keys(self) -> list[str]:
        return sorted(self.held)


def video_of(plan: RequestPlan) -> bytes:
    """Return the video that a request must become, wherever and however often its parts are computed."""
    request = plan.request
    given = b"".join(digest("text", prompt) for prompt in plan.prompts)
    if request.image is not None or request.video is not None:
        given += digest("image", request.seed)
    latents = digest("noise", request.seed)
    for step in range(plan.first_step, request.steps):
        latents = digest(latents, given, step)
    return digest("video", request.seed, latents)


class Slice:
    """A gang of hosts that one leader has. Times and failures are those of the world."""

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
        self.next_fault: str | None = None  # of the next call in lockstep: "device", "hang"
        self.on_loss: Callable[[str], object] = lambda why: None  # called before what its hosts hold is gone
        self._lost: SliceLost | None = None
        self._waiting = Waiting(world.loop)
        self._lanes = {group: Lane(world.loop) for group in ("lockstep", "side", "save", "network")}

    @property
    def is_lost(self) -> bool:
        """Whether it is gone."""
        return self._lost is not None

    def describe(self) -> str:
        return self.name

    def call(
        self,
        method: str,
        *args: Any,
        group: str = "lockstep",
        timeout_s: float | None = None,
        on_progress: Any = None,
    ) -> Returned:
        world = self.world
        with self._lanes[group]:
            self._check()
            seconds = SECONDS.get(method, COPY_S)
            if method == "fetch_adapters":
                seconds = 15.0 if world.hub_is_down else 1.0
            if group == "lockstep" and self.next_fault is not None:
                fault, self.next_fault = self.next_fault, None
                world.tell(f"{self.name}: {method} meets a fault of its devices: {fault}")
                self._waiting.wait(seconds if fault == "device" else timeout_s or 1.0)
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
        """Destroy the gang; whoever waits for a call of it hears why. What its hosts held is gone."""
        if self._lost is None:
            self._lost = why
            self.on_loss(str(why))
            if isinstance(self.host, Host):
                self.host.held.clear()
            self._waiting.wake()
        return self._lost

    def _check(self) -> None:
        self.process.check_thread()
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))


def draining_for(
    world: World, process: Process, deadlines: dict[str, float]
) -> Callable[[Iterable[str]], float | None]:
    """Return what tells a leader how long its hosts are there: a question to Ray, which may not answer for a while."""

    def left(nodes: Iterable[str]) -> float | None:
        world.loop.block(max(CALL_S, world.ray_is_silent_until_s - world.loop.now))
        process.check_thread()
        return min((deadlines[node] - world.loop.now for node in nodes if node in deadlines), default=None)

    return left
