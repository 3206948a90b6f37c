"""Predict how long a compiled TPU program takes, from its scheduled HLO.

Two figures are kept apart. The *estimate* sums the compiler's own estimated cycles. The *floor* gives every item that
is no matrix product the time its HBM bytes need and nothing else. Some of the compiler's estimates are placeholders
(for transposing copies), and no program reaches the floor: the truth lies between. Both add the cycles of the Pallas
kernels, which the compiler doesn't estimate, and what collectives and copies between HBM and VMEM take beyond the
work that is scheduled while they are under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wan_tpu.aot import ici, traffic
from wan_tpu.aot.cost import ZERO, Cost, Hardware, Item, Times
from wan_tpu.aot.hlo import Computation, Instruction, Module, parse
from wan_tpu.aot.ici import Interconnect
from wan_tpu.aot.kernel_calls import KernelCall, read_kernel_call

KernelCycles = Callable[[KernelCall], float | None]


def analyse(
    text: str,
    hardware: Hardware,
    interconnect: Interconnect,
    *,
    kernel_cycles: KernelCycles,
    prefer: Sequence[str] = (),
) -> Cost:
    """Return what the program `compiled.as_text()` costs.

    kernel_cycles  cycles of one Pallas call, None when unknown
    prefer         parts of kernel names: of a conditional, the branch that holds the first of these names is taken;
                   where none does the branch without any kernel, else the costliest
    """
    walk = _Walk(parse(text), hardware, interconnect, kernel_cycles, tuple(prefer))
    walk.run(walk.module.entry, 1.0)
    return Cost(hardware, tuple(walk.items), tuple(dict.fromkeys(walk.unpriced)))


@dataclass
class _Channel:
    """Something that moves data beside the TensorCore: one transfer after the other, in the order of their starts."""

    free: Times = ZERO
    under_way: dict[str, tuple[Times, Times]] = field(default_factory=dict)  # name -> (finish, duration)

    def start(self, name: str, now: Times, seconds: float) -> None:
        begin = Times(max(now.estimate, self.free.estimate), max(now.floor, self.free.floor))
        self.free = begin + Times(seconds, seconds)
        self.under_way[name] = (self.free, Times(seconds, seconds))

    def wait(self, name: str, now: Times) -> tuple[Times, Times]:
        """Return how long the TensorCore waits for a transfer, and how much of the transfer was hidden."""
        finish, duration = self.under_way.pop(name)
        waits = Times(max(0.0, finish.estimate - now.estimate), max(0.0, finish.floor - now.floor))
        hidden = Times(max(0.0, duration.estimate - waits.estimate), max(0.0, duration.floor - waits.floor))
        return waits, hidden


def _kernel_category(name: str) -> str:
    """Return what a kernel of `kernels/` is counted as, by its name."""
    for start, category in (("linear", "matmul"), ("causal_conv", "convolution")):
        if name.startswith(start):
            return category
    return "vector" if "norm" in name else "attention"


@dataclass
class _Walk:
    module: Module
    hardware: Hardware
    interconnect: Interconnect
    kernel_cycles: KernelCycles
    prefer: tuple[str, ...]
    items: list[Item] = field(default_factory=list)
    unpriced: list[str] = field(default_factory=list)

    def run(self, name: str, executions: float) -> Times:
        """Add the items of a computation that runs `executions` times; return the seconds of one run."""
        computation = self.module.computations[name]
        now, links, copies = ZERO, _Channel(), _Channel()
        for instruction in computation.instructions:
            now += self._step(instruction, computation, executions, now, links, copies)
        return now

    def _step(
        self,
        instruction: Instruction,
        computation: Computation,
        executions: float,
        now: Times,
        links: _Channel,
        copies: _Channel,
    ) -> Times:
        opcode = instruction.opcode
        if traffic.free(instruction):
            return ZERO
        if opcode == "while":
            trips = self._trips(instruction, computation)
            return self.run(instruction.called("body")[0], executions * trips) * trips
        if opcode == "conditional":
            return self.run(self._branch(instruction), executions)
        if opcode == "call":
            return self.run(instruction.called("to_apply")[0], executions)
        kind = traffic.collective_kind(instruction, self.module)
        if kind is not None:
            return self._collective(instruction, computation, kind, executions, now, links)
        if opcode.endswith("-start"):
            moved = sum(shape.bytes for user in computation.users[instruction.name] for shape in user.shapes)
            copies.start(instruction.name, now, moved / self.hardware.hbm_bytes_per_s)
            return ZERO
        if opcode.endswith("-done") or "async-done" in instruction.name:
            channel, what = (links, "collectives") if instruction.operands[0] in links.under_way else (copies, "copies")
            waits, hidden = channel.wait(instruction.operands[0], now)
            self._add(instruction, computation, what, executions, waits, hidden=hidden)
            return waits
        return self._compute(instruction, computation, executions)

    def _collective(
        self,
        instruction: Instruction,
        computation: Computation,
        kind: str,
        executions: float,
        now: Times,
        links: _Channel,
    ) -> Times:
        inner = next(i for i in traffic.inside(instruction, self.module) if i.opcode.removesuffix("-start") == kind)
        groups = ici.parse_groups(kind, inner.attributes)
        volume = traffic.collective_bytes(instruction, computation, kind)
        links.start(instruction.name, now, self.interconnect.seconds(kind, groups, volume))
        if instruction.opcode.endswith("-start"):
            return ZERO
        waits, hidden = links.wait(instruction.name, now)
        self._add(instruction, computation, "collectives", executions, waits, hidden=hidden)
        return waits

    def _compute(self, instruction: Instruction, computation: Computation, executions: float) -> Times:
        category = traffic.category(instruction, self.module)
        if category == "kernel":
            call = read_kernel_call(instruction, computation)
            cycles = self.kernel_cycles(call)
            if cycles is None:
                self.unpriced.append(f"kernel {call.name}, grid {call.grid}")
            # A kernel's copies run beside its instructions: the longer of the two.
            moved = traffic.hbm_bytes(instruction, computation, self.module)
            alone = max((cycles or 0.0) / self.hardware.clock_hz, moved / self.hardware.hbm_bytes_per_s)
            what = _kernel_category(call.name)
            self._add(instruction, computation, what, executions, Times(alone, alone), moved=moved, kernel=call)
            return Times(alone, alone)
        estimate = (instruction.estimated_cycles or 0) / self.hardware.clock_hz
        moved = traffic.hbm_bytes(instruction, computation, self.module)
        seconds = Times(estimate, estimate if category == "matmul" else moved / self.hardware.hbm_bytes_per_s)
        operations = traffic.flops(instruction, computation, self.module)
        self._add(instruction, computation, category, executions, seconds, moved=moved, operations=operations)
        return seconds

    def _add(
        self,
        instruction: Instruction,
        computation: Computation,
        category: str,
        executions: float,
        seconds: Times,
        *,
        moved: float = 0.0,
        operations: float = 0.0,
        hidden: Times = ZERO,
        kernel: KernelCall | None = None,
    ) -> None:
        self.items.append(
            Item(
                name=instruction.name,
                category=category,
                where=computation.name,
                op_name=instruction.op_name,
                shape=" ".join(map(str, instruction.shapes)),
                executions=executions,
                seconds=seconds * executions,
                hbm_bytes=moved * executions,
                flops=operations * executions,
                hidden_s=hidden * executions,
                kernel=kernel,
            )
        )

    def _trips(self, loop: Instruction, computation: Computation) -> int:
        """Return how often a loop runs: XLA's own note, or the constant its counter is compared with."""
        known = traffic.known_trip_count(loop)
        if known is None:
            known = traffic.counted_trips(loop, computation, self.module)
        if known is None:
            self.unpriced.append(f"loop {loop.name} of unknown length")
        return 1 if known is None else known

    def _branch(self, conditional: Instruction) -> str:
        branches = conditional.called("branch_computations") or (
            conditional.called("true_computation") + conditional.called("false_computation")
        )
        kernels = {branch: traffic.kernel_names(self.module, branch) for branch in branches}
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
        trial = _Walk(self.module, self.hardware, self.interconnect, self.kernel_cycles, self.prefer)
        return trial.run(branch, 1.0)
