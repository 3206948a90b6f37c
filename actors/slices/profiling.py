"""A trace of one host's computations by JAX's profiler, which XProf and TensorBoard can read."""

import os
import socket
import tempfile
from pathlib import Path

import jax
from ray.util.tpu import init_jax_profiler

from wan_tpu.errors import InvalidInput
from wan_tpu.storage.opening import open_storage

PORT = "JAX_PROFILER_PORT"  # The environment variable that Ray sets.


def open_to_dashboard() -> None:
    """Let Ray's dashboard trace this process, if the environment variable `PORT` names a port.

    JAX's profiler then listens there for anyone who can reach the machine, without asking for a token.
    """
    if PORT in os.environ:
        init_jax_profiler()


class HostProfile:
    """Runs one trace at a time. Each host of a slice writes its own, beside those of the other hosts of the run."""

    _folder: tempfile.TemporaryDirectory[str] | None = None
    _run = ""

    def start_profile(self, run: str) -> None:
        """Begin a trace of that name; raise `InvalidInput` if another is under way."""
        if self._folder is not None:
            raise InvalidInput("this slice is already being profiled; try again when that has ended")
        folder = tempfile.TemporaryDirectory(prefix="wan-tpu-profile-")
        jax.profiler.start_trace(folder.name)  # Called first: if it raises, no trace is recorded as under way.
        self._folder, self._run = folder, run

    def cancel_profile(self, run: str) -> None:
        """End the trace of that name, if it is under way, without writing it."""
        if run != self._run:
            return
        folder, self._folder = self._folder, None
        if folder is not None:
            with folder:
                jax.profiler.stop_trace()

    def stop_profile(self, output: str, run: str) -> int:
        """End the trace and write it to a folder or a bucket; return its bytes."""
        folder, self._folder = self._folder, None
        if folder is None:
            raise InvalidInput("this slice isn't being profiled")
        with folder:
            jax.profiler.stop_trace()
            content = b"".join(file.read_bytes() for file in Path(folder.name).rglob("*.xplane.pb"))
        host = f"{socket.gethostname()}-{jax.process_index()}"
        open_storage(output, private=False).write(f"plugins/profile/{run}/{host}.xplane.pb", content)
        return len(content)
