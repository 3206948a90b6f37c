"""ComfyUI nodes for a wan-tpu service."""

from .nodes import WanTPU


async def comfy_entrypoint() -> WanTPU:
    """Return the pack, as ComfyUI asks for it."""
    return WanTPU()
