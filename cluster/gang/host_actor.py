"""The process of a slice on one TPU host: joins the others, builds the object it is given, and runs its methods."""

import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import os
import pkgutil
import random
import re
import socket
import sys
import time
from typing import Any

import ray

from cluster.errors import ChipsBusy, WrongHost
from cluster.gang.devices import classify_start_failure, wait_for_chips
from cluster.gang.machine_place import read_machine_place
from cluster.gang.protocol import LANES, HostPlace, Lane, LaneRunner, Outcome, Pulse

COORDINATOR_PORTS = (21_000, 31_000)  # Below the ports of outgoing connections on Linux, which start at 32,768.
CHIPS_S = 60.0  # How long the previous user of the chips may take to end.
_CONNECT_S = 0.5  # How long one try to reach the coordinator may take.


class HostActor:
    """One host. The leader sends every host of the slice the same calls; heartbeats are answered in parallel."""

    def __init__(self, place: HostPlace) -> None:
        self._place = place
        self._process = 0  # JAX's index of this process in the slice.
        self._joining = ""
        self._runners = {lane: LaneRunner() for lane in LANES}
        self._host: Any = None
        # torch, JAX and diffusers create half a million objects. With Python's default, a collection after every 700
        # objects, importing them takes a sixth longer.
        gc.set_threshold(20_000)
        if place.devices is not None:
            _emulate(place.devices, place.hosts)
        else:
            # By default JAX would look for other accelerators too; with "tpu" alone, nothing could be put on the CPU.
            os.environ.setdefault("JAX_PLATFORMS", "tpu,cpu")

    @ray.method(concurrency_group="watch")
    def hello(self) -> tuple[Outcome, int]:
        """Return the process id and a free port on which this host could coordinate the others."""
        return Outcome((os.getpid(), _find_free_port(self._place.ip))), 0

    @ray.method(concurrency_group="watch")
    def machine_place(self) -> tuple[Outcome, int]:
        """Return what the machine says about its place in the slice."""
        return Outcome(read_machine_place(metadata=not self._place.emulated)), 0

    @ray.method(concurrency_group="watch")
    def pulse(self, lane: Lane) -> Pulse:
        return dataclasses.replace(self._runners[lane].pulse(), joining=self._joining)

    @ray.method(concurrency_group="lockstep")
    def join(self, coordinator: str, timeout_s: float) -> tuple[Outcome, Any]:
        """Join the other hosts' JAX processes, and return the index that JAX gives this one.

        Worker 0 listens on `coordinator` ("host:port"), but need not be the first process.
        """
        return self._runners["lockstep"].run(self._join, coordinator, timeout_s)

    @ray.method(concurrency_group="lockstep")
    def build(self, host_class: type | str, *args: Any) -> tuple[Outcome, Any]:
        """Build the object whose methods are called."""
        return self._runners["lockstep"].run(self._build, host_class, *args)

    def call(self, lane: Lane, keep: bool, method: str, *args: Any) -> tuple[Outcome, Any]:
        """Run a method of the object in a lane, whose concurrency group the caller chooses.

        Args:
            keep: Whether to return the result even if this isn't the first process.
            *args: Its arguments, which Ray resolves if they are references.
        """
        return self._runners[lane].run(getattr(self._host, method), *args, keep=keep or self._process == 0)

    def _join(self, coordinator: str, timeout_s: float) -> int:
        until = time.monotonic() + timeout_s
        self._joining = "waits until no other process has its chips"
        self._wait_for_chips()
        self._joining = "imports JAX"
        importlib.import_module("jax")
        if self._place.worker_id != 0:
            low, high = COORDINATOR_PORTS
            self._joining = f"can't reach worker 0 at {coordinator} (does a firewall block TCP to ports {low}-{high}?)"
            _wait_for_coordinator(coordinator, until)
        self._joining = "has joined, and waits for the others"
        _join_processes(self._place, coordinator, until - time.monotonic())
        self._joining = "has joined, and starts JAX on its chips"
        self._process = _check_joined(self._place)
        self._joining = ""
        return self._process

    def _wait_for_chips(self) -> None:
        """Wait until the processes of the previous gang have ended. They were killed, which may take a moment."""
        if not self._place.emulated and "jax" not in sys.modules:
            wait_for_chips(CHIPS_S)

    def _build(self, host_class: type | str, *args: Any) -> dict[str, str]:
        """Build the object; return the software that it uses, if its class reports that, since hosts must be alike."""
        self._wait_for_chips()
        if not self._place.emulated:
            _check_chips(self._place)
        kind: Any = pkgutil.resolve_name(host_class) if isinstance(host_class, str) else host_class
        self._host = kind(*args)
        software = getattr(self._host, "software", None)
        return {} if software is None else software()


def _find_free_port(ip: str) -> int:
    """Return a port that no process listens on, outside the range from which the system assigns ports.

    The system might assign a port of that range to another process before JAX listens there. JAX would then end this
    process.
    """
    for port in random.sample(range(*COORDINATOR_PORTS), 20):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((ip, port))
            return port
    raise OSError(f"none of twenty ports from {COORDINATOR_PORTS[0]} to {COORDINATOR_PORTS[1]} is free on {ip}")


def _emulate(devices: int, hosts: int) -> None:
    """Make JAX, which isn't imported yet, offer this many CPU devices."""
    # XLA splits some sums by its number of threads. With the same number everywhere, any number of hosts gives the same
    # bits.
    os.environ["NPROC"] = str(max(os.cpu_count() or 1, devices * hosts))
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()


def _check_chips(place: HostPlace) -> None:
    """Check that JAX has all chips of this host.

    Raises:
        ChipsBusy: Another process has them.
        WrongHost: JAX would never get all of them.
    """
    import jax

    if importlib.util.find_spec("libtpu") is None:
        raise WrongHost(f"on {place} libtpu isn't installed, without which JAX has no TPU: pip install '.[tpu]'")
    try:
        backend = jax.default_backend()
    except RuntimeError as error:  # JAX doesn't fall back to another backend if JAX_PLATFORMS names the TPU.
        raise classify_start_failure(str(place), error) from error
    if backend != "tpu":
        raise ChipsBusy(f"JAX on {place} has {backend}, not the TPU: another process has the chips")
    if jax.local_device_count() != place.chips:
        raise WrongHost(
            f"JAX on {place} has {jax.local_device_count()} devices, not {place.chips}; is TPU_VISIBLE_CHIPS set, or "
            "the machine of another size than its labels say?"
        )


def _wait_for_coordinator(coordinator: str, until: float) -> None:
    """Wait until worker 0 listens, because JAX itself doesn't say whether it waits for that or for another host."""
    host, _, port = coordinator.rpartition(":")
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            return
        time.sleep(_CONNECT_S / 5)


def _join_processes(place: HostPlace, coordinator: str, timeout_s: float) -> None:
    """Join the slice's processes, and wait until all have joined."""
    import jax

    jax.distributed.initialize(
        coordinator,
        place.hosts,
        place.worker_id,
        initialization_timeout=max(1, int(timeout_s)),
        coordinator_bind_address=coordinator if place.worker_id == 0 else None,  # The default is all interfaces.
    )


def _check_joined(place: HostPlace) -> int:
    """Return JAX's index of this process, once JAX has the devices of all processes."""
    import jax

    if place.emulated:
        _emulate_joined(place)
    else:
        _check_chips(place)
    if jax.process_count() != place.hosts:
        raise WrongHost(
            f"JAX on {place} counts {jax.process_count()} processes in the slice, Ray's labels {place.hosts} hosts; do "
            "the slices of two pools have the same name?"
        )
    return jax.process_index()


def _emulate_joined(place: HostPlace) -> None:
    """Let JAX count this slice's processes from another host than worker 0, as may happen on a TPU.

    On a TPU the index depends on the slice's network. For CPU devices, JAX takes the index that is set here.
    """
    import jax
    from jax._src import distributed

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    distributed.global_state.process_id = (place.worker_id + 1) % place.hosts
