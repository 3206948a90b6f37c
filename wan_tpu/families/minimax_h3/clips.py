"""The clips that MiniMax-H3's VAE decodes a video in."""

CLIP_FRAMES, CLIP_LATENTS = 17, 5  # Frames from a clip to the next, and latent frames.
DECODED_LATENTS = 7  # Latent frames of a clip, two of which are the next one's, too.
# Clips of a chunk. 28 tiles of a clip leave an eighth of eight devices idle, 56 of two clips none, and the layers'
# weights are copied half as often.
CLIPS = 2


def chunk_lengths(latent_frames: int) -> tuple[int, ...]:
    """Return how many of a video's 5 n + 2 latent frames each chunk of the decoder takes.

    A chunk has `CLIPS` clips, the last one maybe fewer. The first chunk takes three latent frames more, two that its
    last clip needs and another, and the last takes one less: so the number of available latent frames tells whether a
    chunk is the last.
    """
    clips = (latent_frames - DECODED_LATENTS) // CLIP_LATENTS + 1
    lengths = [CLIP_LATENTS * min(CLIPS, clips - start) for start in range(0, clips, CLIPS)]
    lengths[0] += DECODED_LATENTS - CLIP_LATENTS + 1
    lengths[-1] -= 1
    return tuple(lengths)
