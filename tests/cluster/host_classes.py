"""What the slices of these tests run: small."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cluster.errors import ChipsBusy
from cluster.gang.protocol import DeviceError, Output, report


class OddHost:
    """Computes with other flags on every host."""

    def software(self) -> dict[str, str]:
        return {"jax": "the same", "flags": f"of {jax.process_index()}"}


class BusyAtFirst:
    """Finds its chips taken by another process the first time that it is built."""

    def __init__(self, marker: Path) -> None:
        if not marker.exists():
            marker.touch()
            raise ChipsBusy("process 7 has the chips")


@dataclass(frozen=True)
class Compiling:
    within_s: float | None = None


class SmallHost:
    """Does on its host what the test asks for."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.counted = 0

    def place(self) -> tuple[int, int, int]:
        return jax.process_index(), jax.process_count(), os.getpid()

    def count(self) -> int:
        self.counted += 1
        return self.counted

    def psum(self, value: float) -> tuple[int, int, float]:
        """Return the number of processes and of devices, and the sum of value + rank over all devices."""
        mesh = Mesh(np.array(jax.devices()), ("x",))
        local = np.full((jax.local_device_count(),), value + jax.process_index(), np.float32)
        shards = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), local)
        total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(shards)
        return jax.process_count(), jax.device_count(), float(total)

    def slow(self, steps: int, step_s: float) -> str:
        for step in range(steps):
            report((step + 1, steps))
            time.sleep(step_s)
        return "done"

    def compiles(self, asked_s: float, compile_s: float, then_s: float) -> str:
        """Report a compilation of `asked_s`, take `compile_s`, report its end, and take `then_s` more."""
        report(Compiling(asked_s))
        time.sleep(compile_s)
        report(Compiling())
        time.sleep(then_s)
        return "done"

    def make(self, values: int) -> Output:
        return Output({"made": values}, np.arange(values, dtype=np.float32))

    def total(self, array: np.ndarray, plus: float) -> float:
        return float(array.sum()) + plus

    def fail(self, ranks: tuple[int, ...]) -> str:
        if jax.process_index() in ranks:
            raise ValueError(f"poison on {jax.process_index()}")
        return "fine"

    def fail_on_device(self) -> None:
        """Run a program that fails on the device, like one whose core has halted."""

        def halt(value: Any) -> Any:
            raise RuntimeError("the core has halted")

        jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(halt, x, x))(jnp.ones(())))

    def fail_oddly(self) -> None:
        class OddError(Exception):
            def __init__(self, a: Any, b: Any) -> None:
                super().__init__(f"{a} {b}")

        raise OddError("not", "picklable")

    def fail_then_hang(self, rank: int) -> None:
        if jax.process_index() == rank:
            raise ValueError("left the others waiting")
        time.sleep(600)

    def miss_a_peer(self, rank: int) -> None:
        """Fail like an exchange whose other end is gone."""
        if jax.process_index() == rank:
            raise DeviceError("Gloo AllReduce failed: Connection closed by peer [10.0.0.2]:34567")
        time.sleep(600)

    def kill_itself(self, rank: int, signum: int = signal.SIGKILL) -> None:
        if jax.process_index() == rank:
            os.kill(os.getpid(), signum)
        time.sleep(600)


class Unbuildable:
    def __init__(self) -> None:
        raise RuntimeError("no weights here")


class StopsOneHost:
    """Its host with one rank hangs for ever while its object is built, or only takes long."""

    def __init__(self, rank: int, hung: bool) -> None:
        if jax.process_index() == rank:
            if hung:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
