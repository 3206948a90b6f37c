"""The process of a slice on one TPU host: joins the others, builds what it is told to, and runs its methods."""

import contextlib
import gc
import importlib.util
import os
import pkgutil
import random
import re
import socket
import sys
from typing import Any

import ray

from cluster.errors import ChipsBusy, WrongHost
from cluster.gang.devices import wait_for_chips
from cluster.gang.protocol import GROUPS, Group, GroupRunner, HostPlace, Outcome, Pulse

COORDINATOR_PORTS = (21_000, 31_000)  # below those of outgoing connections on Linux, 32,768 and up
CHIPS_S = 60.0  # for who had them to be gone


class HostActor:
    """One host. The leader sends every host of the slice the same calls; heartbeats are answered beside them."""

    def __init__(self, place: HostPlace) -> None:
        self._place = place
        self._runners = {group: GroupRunner() for group in GROUPS}
        self._host: Any = None
        # torch, JAX and diffusers are half a million objects: looked through after every 700, as is Python's way, they
        # take a sixth longer to import.
        gc.set_threshold(20_000)
        if place.devices is not None:
            _emulate(place.devices, place.hosts)
        else:
            # Without, JAX looks for other accelerators, too; with "tpu" alone nothing could be put on the CPU.
            os.environ.setdefault("JAX_PLATFORMS", "tpu,cpu")

    @ray.method(concurrency_group="watch")
    def hello(self) -> tuple[Outcome, int]:
        """Return the process id and a free port, on which this host could coordinate the others."""
        return Outcome((os.getpid(), _free_port(self._place.ip))), 0

    @ray.method(concurrency_group="watch")
    def pulse(self, group: Group) -> Pulse:
        """Answer a heartbeat."""
        return self._runners[group].pulse()

    @ray.method(concurrency_group="lockstep")
    def join(self, coordinator: str, timeout_s: float) -> tuple[Outcome, Any]:
        """Join the other hosts' JAX; the host with rank 0 listens on `coordinator` ("host:port")."""
        return self._runners["lockstep"].run(self._join, coordinator, timeout_s)

    @ray.method(concurrency_group="lockstep")
    def build(self, host_class: type | str, *args: Any) -> tuple[Outcome, Any]:
        """Make the object whose methods are called."""
        return self._runners["lockstep"].run(self._build, host_class, *args)

    @ray.method(concurrency_group="lockstep")
    def lockstep(self, method: str, *args: Any) -> tuple[Outcome, Any]:
        """Run a method of it, in step with the other hosts."""
        return self._runners["lockstep"].run(getattr(self._host, method), *args, keep=self._place.rank == 0)

    @ray.method(concurrency_group="side")
    def side(self, method: str, *args: Any) -> tuple[Outcome, Any]:
        """Run a method of it beside those in lockstep."""
        return self._runners["side"].run(getattr(self._host, method), *args, keep=self._place.rank == 0)

    @ray.method(concurrency_group="save")
    def save(self, method: str, *args: Any) -> tuple[Outcome, Any]:
        """Run a method of it that copies a state out, beside all others."""
        return self._runners["save"].run(getattr(self._host, method), *args, keep=self._place.rank == 0)

    @ray.method(concurrency_group="network")
    def network(self, method: str, *args: Any) -> tuple[Outcome, Any]:
        """Run a method of it that may wait for the network, beside all others."""
        return self._runners["network"].run(getattr(self._host, method), *args, keep=self._place.rank == 0)

    def _join(self, coordinator: str, timeout_s: float) -> None:
        self._wait_for_chips()
        _join(self._place, coordinator, timeout_s)

    def _wait_for_chips(self) -> None:
        """Let the gang that had this host before go: its processes are killed, and may need a moment to be gone."""
        if not self._place.emulated and "jax" not in sys.modules:
            wait_for_chips(CHIPS_S)

    def _build(self, host_class: type | str, *args: Any) -> dict[str, str]:
        """Return what the host computes with, if its class says: hosts of a gang must be alike."""
        self._wait_for_chips()
        if not self._place.emulated:
            _check_chips(self._place)
        kind: Any = pkgutil.resolve_name(host_class) if isinstance(host_class, str) else host_class
        self._host = kind(*args)
        software = getattr(self._host, "software", None)
        return {} if software is None else software()


def _free_port(ip: str) -> int:
    """Return a port that nobody listens on, none of those that the system gives out by itself.

    Such a one may be given to another process before JAX listens there, and JAX ends the process then.
    """
    for port in random.sample(range(*COORDINATOR_PORTS), 20):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((ip, port))
            return port
    raise OSError(f"of twenty ports from {COORDINATOR_PORTS[0]} to {COORDINATOR_PORTS[1]} none is free on {ip}")


def _emulate(devices: int, hosts: int) -> None:
    """Let JAX, which isn't imported yet, show so many CPU devices."""
    # XLA cuts some sums by its number of threads: as many everywhere gives the same bits whatever the number of hosts.
    os.environ["NPROC"] = str(max(os.cpu_count() or 1, devices * hosts))
    os.environ["JAX_PLATFORMS"] = "cpu"
    others = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{others} --xla_force_host_platform_device_count={devices}".strip()


def _check_chips(place: HostPlace) -> None:
    """Raise `ChipsBusy` unless JAX gets the TPU of this host, `WrongHost` where it would never get all its chips."""
    import jax

    if importlib.util.find_spec("libtpu") is None:
        raise WrongHost(f"on {place} libtpu isn't installed, without which JAX has no TPU: pip install 'wan-tpu[tpu]'")
    try:
        found = jax.default_backend()
    except RuntimeError as error:  # JAX takes no other one where JAX_PLATFORMS names the TPU
        raise ChipsBusy(f"JAX on {place} doesn't get the TPU: {error}") from error
    if found != "tpu":
        raise ChipsBusy(f"JAX on {place} has {found}, not the TPU: another process has the chips")
    if jax.local_device_count() != place.chips:
        raise WrongHost(
            f"JAX on {place} has {jax.local_device_count()} devices, not {place.chips}; is TPU_VISIBLE_CHIPS set, or "
            "the machine of another size than its labels say?"
        )


def _join(place: HostPlace, coordinator: str, timeout_s: float) -> None:
    import jax

    if place.emulated:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        place.hosts,
        place.rank,
        initialization_timeout=int(timeout_s),
        coordinator_bind_address=coordinator if place.rank == 0 else None,  # else on all interfaces
    )
    if (jax.process_count(), jax.process_index()) != (place.hosts, place.rank):
        raise RuntimeError(
            f"JAX counts this process as {jax.process_index()} of {jax.process_count()}, Ray's labels say "
            f"{place.rank} of {place.hosts}; the label ray.io/tpu-worker-id must be the TPU's own worker id"
        )
