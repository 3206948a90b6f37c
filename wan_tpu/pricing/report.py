"""Print what a program costs."""

from wan_tpu.pricing.cost import CATEGORIES, Cost, Item


def describe(cost: Cost, *, top: int = 20) -> str:
    """Return tables for people: seconds by category, cycles of each loop's iteration, the costliest items."""
    total = cost.total
    lines = [
        f"{cost.hardware.name}: {total.estimate:.3f} s by the compiler's estimate, {total.floor:.3f} s at the floor"
    ]
    lines += [f"  {name:<12}{times.estimate:9.3f} {times.floor:9.3f} s" for name, times in cost.by_category().items()]
    share = cost.matmul_flops / cost.hardware.peak_flops
    lines.append(f"  matrix products outside of kernels: {cost.matmul_flops / 1e12:.1f} TFLOP, {share:.3f} s at peak")
    lines += [f"  NOT COUNTED: {name}" for name in cost.unpriced]
    for where, runs in cost.loops()[:2]:
        lines += ["", f"million cycles an iteration of {where} ({runs:g} in all): estimate, floor"]
        lines += _format_cycles(cost, where, runs)
    lines += ["", f"{'estimate':>9}{'floor':>9}{'hidden':>9} ms"]
    lines += [_format_line(item, cost.hardware.clock_hz) for item in cost.top(top)]
    return "\n".join(lines)


def _format_cycles(cost: Cost, where: str, runs: float) -> list[str]:
    scale = cost.hardware.clock_hz / 1e6 / runs
    by_category = cost.by_category(where)
    lines = [f"  {name:<12}{t.estimate * scale:9.2f} {t.floor * scale:9.2f}" for name, t in by_category.items()]
    outside = [by_category[name] for name in CATEGORIES if name not in ("attention", "collectives")]
    estimate, floor = (sum(getattr(t, figure) for t in outside) * scale for figure in ("estimate", "floor"))
    return [*lines, f"  {'on the core, outside attention':<12} {estimate:.2f} {floor:.2f}"]


def _format_line(item: Item, clock_hz: float) -> str:
    estimate, floor, hidden = (1e3 * s for s in (item.seconds.estimate, item.seconds.floor, item.hidden_s.estimate))
    size = f"{item.hbm_bytes / item.executions / 1e6:.0f} MB" if item.hbm_bytes else ""
    grid = ""
    if item.kernel:
        cycles = item.seconds.estimate / item.executions * clock_hz / item.kernel.steps
        grid = f"grid {item.kernel.grid}, {cycles:.0f} cycles a step"
    return (
        f"{estimate:9.2f}{floor:9.2f}{hidden:9.2f} x{item.executions:<4g} {item.category:<11} {item.name:<32} "
        f"{item.shape[:64]} {size}{grid} {item.op_name[-60:]}"
    )
