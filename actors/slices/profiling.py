"""A trace of what one host computes, by JAX's profiler, as XProf and TensorBoard read it."""

import os
import socket
import tempfile
from pathlib import Path

import jax
from ray.util.tpu import init_jax_profiler

from wan_tpu.errors import InvalidInput
from wan_tpu.storage.opening import open_storage

PORT = "JAX_PROFILER_PORT"  # Ray's own name


def open_to_dashboard() -> None:
    """Let the dashboard of Ray trace this process, where `PORT` says at which of this machine's ports.

    JAX's profiler listens there for whoever reaches the machine, and asks for no token.
    """
    if PORT in os.environ:
        init_jax_profiler()


class HostProfile:
    """One trace at a time. Each host of a slice has its own; in one run, they lie beside each other."""

    _folder: tempfile.TemporaryDirectory[str] | None = None
    _run = ""

    def start_profile(self, run: str) -> None:
        """Begin one of that name; raises `InvalidInput` while one is under way."""
        if self._folder is not None:
            raise InvalidInput("a profile of this slice is under way; try again when it has ended")
        folder = tempfile.TemporaryDirectory(prefix="wan-tpu-profile-")
        jax.profiler.start_trace(folder.name)  # where it is refused, the next one may begin
        self._folder, self._run = folder, run

    def cancel_profile(self, run: str) -> None:
        """End the one of that name without writing it; it may not be under way, or another may be."""
        if run != self._run:
            return
        folder, self._folder = self._folder, None
        if folder is not None:
            with folder:
                jax.profiler.stop_trace()

    def stop_profile(self, output: str, run: str) -> int:
        """End it and write it to a folder or gs://; return its bytes."""
        folder, self._folder = self._folder, None
        if folder is None:
            raise InvalidInput("no profile of this slice is under way")
        with folder:
            jax.profiler.stop_trace()
            content = b"".join(file.read_bytes() for file in Path(folder.name).rglob("*.xplane.pb"))
        host = f"{socket.gethostname()}-{jax.process_index()}"
        open_storage(output, private=False).write(f"plugins/profile/{run}/{host}.xplane.pb", content)
        return len(content)
