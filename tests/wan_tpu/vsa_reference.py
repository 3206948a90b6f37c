"""FastVideo's attention of MiniMax-H3, VIDEO_SPARSE_ATTN_H3 with tiles of 64 rows, in plain torch."""

import math

import torch


def cut_into_tiles(grid, segments):
    """Return the rows of each of FastVideo's tiles of [segments | video], and how many are of segments.

    Segments are cut every 64 rows, the video in boxes of 4 x 4 x 4.
    """
    cuts = [
        part
        for segment in torch.arange(sum(segments)).split(list(segments))
        if len(segment)
        for part in segment.split(64)
    ]
    video = sum(segments) + torch.arange(math.prod(grid)).reshape(grid)
    boxes = [box.flatten() for t in video.split(4) for h in t.split(4, dim=1) for box in h.split(4, dim=2)]
    return cuts + boxes, len(cuts)


def video_sparse_attention(query, key, value, gate, tiles, cuts, sparsity, least_gap=1e-6):
    """Return attention [L, N, D]: exact to the chosen tiles, plus the gate times that to the means of all tiles.

    Tiles are from `cut_into_tiles`; `least_gap` is as for `minimax_h3_reference.attend_sparsely`.
    """
    query, key, value, gate = (x.transpose(0, 1) for x in (query, key, value, gate))
    means = [torch.stack([x[:, tile].mean(dim=1) for tile in tiles], dim=1) for x in (query, key, value)]
    scores = means[0] @ means[1].transpose(1, 2) * query.shape[-1] ** -0.5
    coarse, output = scores.softmax(dim=-1) @ means[2], torch.empty_like(query)
    boxes = len(tiles) - cuts
    count = max(1, min(math.ceil((1 - sparsity) * boxes), boxes))
    for i, rows in enumerate(tiles):
        best = scores[:, i, cuts:].sort(dim=1, descending=True)
        if cuts <= i and count < boxes:
            gaps = (best.values[:, count - 1] - best.values[:, count]) / scores[:, i].abs().amax(dim=1)
            assert gaps.min() > least_gap, gaps.min()
        for head, kept in enumerate(best.indices[:, :count]):
            keys = torch.cat(tiles if i < cuts else [*tiles[:cuts], *(tiles[cuts + box] for box in kept)])
            logits = query[head, rows] @ key[head, keys].T * query.shape[-1] ** -0.5
            exact = logits.softmax(dim=-1) @ value[head, keys]
            output[head, rows] = exact + coarse[head, i] * gate[head, rows]
    return output.transpose(0, 1)
