"""Draw the slices of a cluster as text."""

from collections.abc import Sequence

from cluster.inventory import LiveSlice


def draw(slices: Sequence[LiveSlice]) -> str:
    if not slices:
        return "no TPU hosts"
    titles = [_describe(slice_) for slice_ in slices]
    widths = [max(map(len, column)) for column in zip(*titles, strict=True)]
    blocks = ["slices", *(_draw_slice(item, title, widths) for item, title in zip(slices, titles, strict=True))]
    busy = sum(s.holder is not None for s in slices)
    broken = sum(bool(s.missing) for s in slices)
    summary = f"{len(slices)} slices: {len(slices) - busy - broken} free, {busy} taken"
    blocks.append(f"  {summary}, {broken} with hosts missing" if broken else f"  {summary}")
    return "\n".join(blocks)


def _describe(item: LiveSlice) -> tuple[str, str, str]:
    kind = f"{'emulated ' if item.emulated else ''}{item.spec or item.pod_type}"
    return item.name, kind, item.holder or ("free" if not item.missing else "unusable")


def _draw_slice(item: LiveSlice, title: Sequence[str], widths: Sequence[int]) -> str:
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
        cells = title if rank == ranks[0] else ("", "", "")
        padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"  {padded}  {bracket} {text}")
    return "\n".join(lines)
