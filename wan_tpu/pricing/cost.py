"""The cost of a program: seconds by kind of work, as the compiler estimates them and at the HBM floor."""

from dataclasses import dataclass

from wan_tpu.aot.topology import Hardware
from wan_tpu.pricing.kernel_calls import KernelCall
from wan_tpu_kernels.catalogue import ATTENTION, CONVOLUTION, MATMUL, VECTOR

CATEGORIES = (MATMUL, CONVOLUTION, ATTENTION, VECTOR, "copies", "collectives")


@dataclass(frozen=True)
class Times:
    """Seconds by both ways of counting."""

    estimate: float
    floor: float

    def __add__(self, other: "Times") -> "Times":
        return Times(self.estimate + other.estimate, self.floor + other.floor)

    def or_later(self, other: "Times") -> "Times":
        """Return the later of two moments, by each way of counting."""
        return Times(max(self.estimate, other.estimate), max(self.floor, other.floor))

    def __mul__(self, count: float) -> "Times":
        return Times(self.estimate * count, self.floor * count)


ZERO = Times(0.0, 0.0)


@dataclass(frozen=True)
class Item:
    """One scheduled instruction and what all its executions in one run of the program cost.

    Attributes:
        name: The instruction's name.
        category: One of `CATEGORIES`.
        where: The computation that holds it.
        op_name: The operation of the traced program that it comes from.
        shape: The shapes of its results.
        executions: How often it runs.
        seconds: Summed over the executions; of a collective or an asynchronous copy, the part that no work hides.
        hbm_bytes: The HBM traffic, summed over the executions.
        flops: The operations of matrix products, summed over the executions.
        hidden_s: The part of a collective or an asynchronous copy that other work hides.
        kernel: The Pallas call, if it is one.
    """

    name: str
    category: str
    where: str
    op_name: str
    shape: str
    executions: float
    seconds: Times
    hbm_bytes: float = 0.0
    flops: float = 0.0
    hidden_s: Times = ZERO
    kernel: KernelCall | None = None


@dataclass(frozen=True)
class Cost:
    """The cost of one run of a program on each device.

    Attributes:
        hardware: The chip.
        items: The instructions that take time.
        unpriced: Pallas kernels without a price, which count as nothing; those of no known kind, which count as vector
            work; and loops of unknown length, which count once.
    """

    hardware: Hardware
    items: tuple[Item, ...]
    unpriced: tuple[str, ...]

    @property
    def total(self) -> Times:
        """All seconds."""
        return sum((item.seconds for item in self.items), ZERO)

    def by_category(self, where: str | None = None) -> dict[str, Times]:
        """Return seconds by category; `where` keeps one computation, such as the body of the layers' loop."""
        seconds = dict.fromkeys(CATEGORIES, ZERO)
        for item in self.items:
            if where is None or item.where == where:
                seconds[item.category] += item.seconds
        return seconds

    @property
    def matmul_flops(self) -> float:
        """Operations of matrix products; those inside Pallas kernels are not known here."""
        return sum(item.flops for item in self.items)

    def top(self, count: int, where: str | None = None) -> list[Item]:
        """Return the costliest items by estimate."""
        chosen = [item for item in self.items if where is None or item.where == where]
        return sorted(chosen, key=lambda item: -max(item.seconds.estimate, item.seconds.floor))[:count]

    def loops(self) -> list[tuple[str, float]]:
        """Return the computations that run more than once and how often, costliest first."""
        cost: dict[str, float] = {}
        runs: dict[str, float] = {}
        for item in self.items:
            cost[item.where] = cost.get(item.where, 0.0) + item.seconds.estimate
            runs[item.where] = item.executions
        return [(name, runs[name]) for name in sorted(cost, key=lambda name: -cost[name]) if runs[name] > 1]
