"""How MiniMax-H3's text encoder, Qwen3-VL, sees the keyframes of a video.

- `pictures`: their size and patches, and how many rows of the text they take; it needs neither torch nor JAX.
- `tower`: the vision tower, which turns patches into tokens.
- `presentation`: a prompt together with its keyframes, as the language model reads it.
"""
