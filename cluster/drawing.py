"""Draw the slices of a cluster as text."""

from collections.abc import Sequence

from cluster.inventory import LiveSlice


def draw(slices: Sequence[LiveSlice]) -> str:
    """Return a drawing of slices with their hosts and holders."""
    if not slices:
        return "no TPU hosts"
    blocks = ["slices", *map(_draw_slice, slices)]
    busy = sum(s.holder is not None for s in slices)
    broken = sum(bool(s.missing) for s in slices)
    summary = f"{len(slices)} slices: {len(slices) - busy - broken} free, {busy} taken"
    blocks.append(f"  {summary}, {broken} with hosts missing" if broken else f"  {summary}")
    return "\n".join(blocks)


def _draw_slice(item: LiveSlice) -> str:
    kind = f"{'emulated ' if item.emulated else ''}{item.spec or item.pod_type}"
    state = item.holder or ("free" if not item.missing else "unusable")
    lines = []
    by_id = {host.worker_id: host for host in item.hosts}
    ranks = sorted({*by_id, *item.missing})
    for rank in ranks:
        bracket = "[" if len(ranks) == 1 else "┌" if rank == ranks[0] else "└" if rank == ranks[-1] else "│"
        host = by_id.get(rank)
        if host is None:
            text = f"host {rank}  missing"
        else:
            devices = "" if host.devices is None else f"  {host.devices} CPU device{'s' if host.devices > 1 else ''}"
            text = f"host {rank}  node {host.node_id[:8]} at {host.ip}{devices}"
        first = rank == ranks[0]
        lines.append(
            f"  {item.name if first else '':<12} {kind if first else '':<18} "
            f"{state if first else '':<12} {bracket} {text}"
        )
    return "\n".join(lines)
