"""The cost of a program: seconds by kind of work, as the compiler estimates them and at the HBM floor."""

from dataclasses import dataclass

from wan_tpu.aot.topology import Hardware
from wan_tpu.pricing.kernel_calls import KernelCall
from wan_tpu_kernels.catalogue import ATTENTION, CONVOLUTION, MATMUL, VECTOR

CATEGORIES = (MATMUL, CONVOLUTION, ATTENTION, VECTOR, "copies", "collectives")


@dataclass(frozen=True)
class Times:
    """Seconds by three ways of counting."""

    estimate: float  # As the compiler estimates.
    floor: float  # The same, but work that isn't a matrix product takes as long as moving its bytes.
    # What the chip allows: products at the peak or bytes at the bandwidth, with all transfers hidden.
    limit: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(self.estimate + other.estimate, self.floor + other.floor, self.limit + other.limit)

    def or_later(self, other: "Times") -> "Times":
        """Return the later of two moments, by each way of counting."""
        pairs = ((self.estimate, other.estimate), (self.floor, other.floor), (self.limit, other.limit))
        return Times(*map(max, pairs))

    def __mul__(self, count: float) -> "Times":
        return Times(self.estimate * count, self.floor * count, self.limit * count)


ZERO = Times(0.0, 0.0)


@dataclass(frozen=True)
class Item:
    """One scheduled instruction and what all its executions in one run of the program cost."""

    name: str
    category: str  # One of `CATEGORIES`.
    where: str  # The computation that holds it.
    op_name: str  # The operation of the traced program that it comes from.
    shape: str  # The shapes of its results.
    executions: float
    seconds: Times  # Summed over the executions; of a collective or an asynchronous copy, the part that no work hides.
    hbm_bytes: float = 0.0  # The HBM traffic, summed over the executions.
    flops: float = 0.0  # The operations of matrix products, summed over the executions.
    hidden_s: Times = ZERO  # The part of a collective or an asynchronous copy that other work hides.
    kernel: KernelCall | None = None  # The Pallas call, if it is one.


@dataclass(frozen=True)
class Cost:
    """The cost of one run of a program on each device."""

    hardware: Hardware
    items: tuple[Item, ...]
    # Pallas kernels without a price, which count as nothing; those of no known kind, which count as vector work; and
    # loops of unknown length, which count once.
    unpriced: tuple[str, ...]

    @property
    def total(self) -> Times:
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
