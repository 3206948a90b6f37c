"""Predict how long a compiled TPU program takes, from its scheduled HLO.

There are two figures. The *estimate* sums the compiler's own estimated cycles. The *floor* gives every item that isn't
a matrix product only the time that its HBM traffic needs. Some of the compiler's estimates are placeholders (for
transposing copies), and no program reaches the floor: the truth lies between. Both add the cycles of the Pallas
kernels, which the compiler doesn't estimate, and the time of collectives and of copies between HBM and VMEM that isn't
hidden by work scheduled meanwhile.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wan_tpu.aot.topology import Hardware
from wan_tpu.pricing import ici, traffic
from wan_tpu.pricing.cost import ZERO, Cost, Item, Times
from wan_tpu.pricing.hlo import Computation, Instruction, Module, parse
from wan_tpu.pricing.ici import Interconnect
from wan_tpu.pricing.kernel_calls import KernelCall, read_kernel_call
from wan_tpu_kernels.catalogue import ATTENTION, VECTOR, find_kind

UNKNOWN = 2**63 - 1  # The compiler's value for a fusion whose cycles it can't estimate.
KernelCycles = Callable[[KernelCall], float | None]
# Kernels that XLA itself writes: it compiles plain attention into one where logits are neither scaled nor masked.
_OF_XLA = {"online-softmax": ATTENTION}


def analyse(
    text: str,
    hardware: Hardware,
    interconnect: Interconnect,
    *,
    kernel_cycles: KernelCycles,
    prefer: Sequence[str] = (),
    others: str | None = None,
) -> Cost:
    """Return what a program costs.

    Args:
        text: The program's scheduled HLO, from `compiled.as_text()`.
        kernel_cycles: Returns the cycles of one Pallas call, or None if they are unknown.
        prefer: Parts of kernel names. Of a conditional, the branch that holds the first of these names is taken; where
            none does, the branch without any kernel, or else the costliest. A loop that runs once or not at all runs if
            it holds one of them.
        others: The category of kernels that aren't ours. Without it, they count as vector work, and the cost says so.
    """
    walk = _Walk(parse(text), hardware, interconnect, kernel_cycles, tuple(prefer), others)
    walk.run(walk.module.entry, 1.0)
    return Cost(hardware, tuple(walk.items), tuple(dict.fromkeys(walk.unpriced)))


@dataclass
class _Channels:
    """Channels that move data in parallel with the TensorCore, each doing one transfer at a time, in start order."""

    free: dict[Hashable, Times] = field(default_factory=dict)  # When each has finished all that was started.
    under_way: dict[str, tuple[Times, Times]] = field(default_factory=dict)  # Finish and duration by name.

    def start(self, name: str, now: Times, busy: Mapping[Any, float]) -> None:
        """Start a transfer; `busy` says for how long it occupies each channel that it uses."""
        finish, duration = now, max(busy.values(), default=0.0)
        for channel, seconds in busy.items():
            self.free[channel] = now.or_later(self.free.get(channel, ZERO)) + Times(seconds, seconds)
            finish = finish.or_later(self.free[channel])
        self.under_way[name] = (finish, Times(duration, duration))

    def wait(self, name: str, now: Times) -> tuple[Times, Times]:
        """Return how long the TensorCore waits for a transfer, and how much of the transfer was hidden."""
        finish, duration = self.under_way.pop(name)
        waits = Times(max(0.0, finish.estimate - now.estimate), max(0.0, finish.floor - now.floor))
        hidden = Times(max(0.0, duration.estimate - waits.estimate), max(0.0, duration.floor - waits.floor))
        return waits, hidden


@dataclass
class _Walk:
    """Walks the schedules of a program's computations and adds an item for each instruction."""

    module: Module
    hardware: Hardware
    interconnect: Interconnect
    kernel_cycles: KernelCycles
    prefer: tuple[str, ...]
    others: str | None
    items: list[Item] = field(default_factory=list)
    unpriced: list[str] = field(default_factory=list)

    def run(self, name: str, executions: float) -> Times:
        """Add the items of a computation that runs `executions` times; return the seconds of one run."""
        run = _ComputationWalk(self, self.module.computations[name], executions)
        for instruction in run.computation.instructions:
            run.now += run.step(instruction)
        return run.now

    def seconds_of_kernel(self, call: KernelCall) -> float:
        """Return the seconds of one Pallas call; 0 if it has no price, which is recorded."""
        cycles = self.kernel_cycles(call)
        if cycles is None:
            self.unpriced.append(f"kernel {call.name}, grid {call.grid}")
        return (cycles or 0.0) / self.hardware.clock_hz

    def categorize_kernel(self, name: str) -> str:
        """Return the category of a kernel; one that nobody declares is recorded."""
        kind = find_kind(name) or _OF_XLA.get(name.partition(".")[0]) or self.others
        if kind is None:
            self.unpriced.append(f"kernel {name} of no known kind")
        return kind or VECTOR

    def trips(self, loop: Instruction, computation: Computation) -> int:
        """Return how often a loop runs: XLA's own note, or the constant its counter is compared with.

        A loop without either that holds kernels repeats a failed attempt: it runs if its kernels are the preferred
        ones.
        """
        known = traffic.read_trip_count(loop)
        if known is None:
            known = traffic.count_trips(loop, computation, self.module)
        if known is None and (kernels := traffic.list_kernel_names(self.module, loop.list_called("body")[0])):
            return int(any(name in kernel for name in self.prefer for kernel in kernels))
        if known is None:
            self.unpriced.append(f"loop {loop.name} of unknown length")
        return 1 if known is None else known

    def branch(self, conditional: Instruction) -> str:
        branches = conditional.list_called("branch_computations") or (
            conditional.list_called("true_computation") + conditional.list_called("false_computation")
        )
        kernels = {branch: traffic.list_kernel_names(self.module, branch) for branch in branches}
        for name in self.prefer:
            for branch in branches:
                if any(name in kernel for kernel in kernels[branch]):
                    return branch
        without = [branch for branch in branches if not kernels[branch]]
        if len(without) == 1:
            return without[0]
        return max(branches, key=lambda branch: self._alone(branch).estimate)

    def _alone(self, branch: str) -> Times:
        """Return the seconds of a branch without adding its items."""
        trial = _Walk(self.module, self.hardware, self.interconnect, self.kernel_cycles, self.prefer, self.others)
        return trial.run(branch, 1.0)


@dataclass
class _ComputationWalk:
    """One computation of a walk, at the time `now` since its start."""

    walk: _Walk
    computation: Computation
    executions: float
    now: Times = ZERO
    links: _Channels = field(default_factory=_Channels)
    copies: _Channels = field(default_factory=_Channels)

    def step(self, instruction: Instruction) -> Times:
        """Add what an instruction costs; return the seconds that the TensorCore spends on it."""
        opcode, walk = instruction.opcode, self.walk
        if traffic.is_free(instruction):
            return ZERO
        if opcode == "while":
            trips = walk.trips(instruction, self.computation)
            return walk.run(instruction.list_called("body")[0], self.executions * trips) * trips
        if opcode == "conditional":
            return walk.run(walk.branch(instruction), self.executions)
        if opcode == "call":
            return walk.run(instruction.list_called("to_apply")[0], self.executions)
        if traffic.ends_collective(instruction):
            return self._wait(instruction, traffic.name_channel(instruction, walk.module), self.links, "collectives")
        kind = traffic.find_collective_kind(instruction, walk.module)
        if kind is not None:
            return self._collective(instruction, kind)
        if opcode.endswith(("-start", "-update")):
            users = self.computation.users[instruction.name]
            if any(user.opcode.endswith("-update") for user in users):  # A SparseCore begins only there.
                return ZERO
            nbytes = sum(shape.bytes for user in users for shape in user.shapes)
            self.copies.start(instruction.name, self.now, {"HBM": nbytes / walk.hardware.hbm_bytes_per_s})
            return ZERO
        if opcode.endswith("-done") or "async-done" in instruction.name:
            started = instruction.operands[0]
            if started in self.links.under_way:
                return self._wait(instruction, started, self.links, "collectives")
            return self._wait(instruction, started, self.copies, "copies")
        return self._compute(instruction)

    def _collective(self, instruction: Instruction, kind: str) -> Times:
        inside = traffic.walk_inside(instruction, self.walk.module)
        inner = next(i for i in inside if i.opcode.removesuffix("-start") == kind)
        volume = traffic.count_collective_bytes(instruction, self.computation, kind)
        busy = self.walk.interconnect.busy(kind, ici.parse_groups(kind, inner.attributes), volume)
        if traffic.begins_collective(instruction):
            self.links.start(traffic.name_channel(instruction, self.walk.module), self.now, busy)
            return ZERO
        self.links.start(instruction.name, self.now, busy)
        if instruction.opcode.endswith("-start"):
            return ZERO
        return self._wait(instruction, instruction.name, self.links, "collectives")

    def _wait(self, instruction: Instruction, started: str, channels: _Channels, category: str) -> Times:
        waits, hidden = channels.wait(started, self.now)
        return self._add(instruction, category, waits, hidden_s=hidden * self.executions)

    def _compute(self, instruction: Instruction) -> Times:
        walk, hardware = self.walk, self.walk.hardware
        category = traffic.categorize(instruction, walk.module)
        nbytes = traffic.count_hbm_bytes(instruction, self.computation, walk.module)
        if category == "kernel":
            call = read_kernel_call(instruction, self.computation)
            nbytes -= call.unread_bytes
            # A kernel's copies run in parallel with its instructions, so the longer of the two counts.
            alone = max(walk.seconds_of_kernel(call), nbytes / hardware.hbm_bytes_per_s)
            products_s = 2 * call.macs * call.busy * call.steps / hardware.peak_flops
            seconds = Times(alone, alone, min(alone, max(products_s, nbytes / hardware.hbm_bytes_per_s)))
            kernel_category = walk.categorize_kernel(call.name)
            return self._add(instruction, kernel_category, seconds, hbm_bytes=nbytes * self.executions, kernel=call)
        moving_s, moved_in_all = nbytes / hardware.hbm_bytes_per_s, nbytes * self.executions
        flops = traffic.count_flops(instruction, self.computation, walk.module)
        if instruction.estimated_cycles == UNKNOWN:
            estimate = max(moving_s, flops / hardware.peak_flops)
        else:
            estimate = (instruction.estimated_cycles or 0) / hardware.clock_hz
        limit = min(estimate, max(moving_s, flops / hardware.peak_flops))
        seconds = Times(estimate, estimate if category == "matmul" else moving_s, limit)
        amounts = {"hbm_bytes": moved_in_all, "flops": flops * self.executions}
        return self._add(instruction, category, seconds, **amounts)

    def _add(self, instruction: Instruction, category: str, seconds: Times, **amounts: Any) -> Times:
        """Add an item and return its seconds, those of one execution; `amounts` are those of all executions."""
        item = Item(
            name=instruction.name,
            category=category,
            where=self.computation.name,
            op_name=instruction.op_name,
            shape=" ".join(map(str, instruction.shapes)),
            executions=self.executions,
            seconds=seconds * self.executions,
            **amounts,
        )
        self.walk.items.append(item)
        return seconds
