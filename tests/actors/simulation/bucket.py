"""A stand-in for storage that is slow, full or down at times."""

import contextlib
import io
from collections.abc import Iterator

from tests.actors.simulation.world import Process, World
from wan_tpu.storage.base import Missing, StorageError


class Bucket:
    """Storage that is slow, full, or down at times. All processes share it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.content: dict[str, bytes] = {}
        self.seconds, self.is_down, self.is_full = 0.02, False, False
        self.failures, self.was_ill = 0, False


class BucketOfProcess:
    """The `Storage` of one process."""

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

    def size(self, name: str) -> int:
        return len(self.read(name))

    def open(self, name: str, start: int = 0) -> io.BytesIO:
        return io.BytesIO(self.read(name, start))

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[io.BytesIO]:
        file = io.BytesIO()
        yield file
        self.write(name, file.getvalue())

    def free(self) -> int | None:
        return None

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
