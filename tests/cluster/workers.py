"""What the slices of these tests run: small, and jax only where it must be."""

import os
import signal
import time
from typing import Any

import numpy as np

from cluster.slices import Output, report, this_host


class Worker:
    """Does on its host what the test asks for."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.counted = 0

    def place(self) -> tuple[int, int, int]:
        place = this_host()
        return place.rank, place.hosts, os.getpid()

    def count(self) -> int:
        self.counted += 1
        return self.counted

    def psum(self, value: float) -> tuple[int, int, float]:
        """Processes, devices, and the sum over all of them of value + rank."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

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

    def make(self, values: int) -> Output:
        return Output({"made": values}, np.arange(values, dtype=np.float32))

    def total(self, array: np.ndarray, plus: float) -> float:
        return float(array.sum()) + plus

    def fail(self, ranks: tuple[int, ...]) -> str:
        if this_host().rank in ranks:
            raise ValueError(f"poison on {this_host().rank}")
        return "fine"

    def fail_oddly(self) -> None:
        class OddError(Exception):
            def __init__(self, a: Any, b: Any) -> None:
                super().__init__(f"{a} {b}")

        raise OddError("not", "picklable")

    def fail_then_hang(self, rank: int) -> None:
        if this_host().rank == rank:
            raise ValueError("left the others waiting")
        time.sleep(600)

    def kill_itself(self, rank: int, signum: int = signal.SIGKILL) -> None:
        if this_host().rank == rank:
            os.kill(os.getpid(), signum)
        time.sleep(600)


class Unbuildable:
    def __init__(self) -> None:
        raise RuntimeError("no weights here")
