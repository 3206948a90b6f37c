"""FastVideo's FastH3: MiniMax-H3 distilled to few steps from text, with video sparse attention.

Sources: fastvideo_inference.json of FastVideo/FastVideo-FastH3-8-Step-V2 on the Hugging Face hub, and what reads it and
the first version, which has no such file: github.com/vllm-project/vllm-omni at 0.30.0, models/minimax_h3/fasth3.py and
fasth3_checkpoint.py.
"""

from dataclasses import dataclass
from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError

CONTRACT = "fastvideo_inference.json"  # Beside the checkpoint's index: what the transformer was distilled for.
FIXED = {
    "schema_version": "fasth3-inference-contract-v1",
    "attention_backend": "VIDEO_SPARSE_ATTN_H3",
    "vsa_tile_size": 64,
    "guidance_scale": 1.0,
    "task": "t2av",
}
_THOUSANDTHS = 1000.0  # The unit of its noise levels.


@dataclass(frozen=True)
class FastH3:
    """What a transformer was distilled for.

    Attributes:
        sparsity: The share of the video's tiles that each of them leaves out.
        levels: The noise level of each step before the shift.
    """

    sparsity: float
    levels: tuple[float, ...]


V1 = FastH3(0.9, (0.999, 0.749, 0.5, 0.25))
V2 = FastH3(0.8, (0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125))


def read_contract(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what FastVideo's file states; {} without one.

    Raises:
        CheckpointError: The file states something that isn't supported.
    """
    if not (checkpoint.folder / CONTRACT).is_file():
        return {}
    contract = checkpoint.config(".", CONTRACT)
    if wrong := {key: contract.get(key) for key, value in FIXED.items() if contract.get(key) != value}:
        raise CheckpointError(f"{checkpoint.source}/{CONTRACT} has {wrong}; supported: {FIXED}")
    levels, sparsity = contract.get("dmd_denoising_steps"), contract.get("vsa_sparsity", 1.0)
    shifts = [contract.get(f"{part}_scheduler_shift") for part in ("video", "audio")]
    numbers = [*(levels if isinstance(levels, list) else []), sparsity, *shifts]
    if not levels or any(not isinstance(number, int | float) or number <= 0 for number in numbers) or sparsity >= 1:
        raise CheckpointError(
            f"{checkpoint.source}/{CONTRACT} has dmd_denoising_steps {levels}, vsa_sparsity {sparsity} and scheduler "
            f"shifts {shifts}; they must be positive numbers, and the sparsity below 1"
        )
    return contract


def read_fasth3(checkpoint: Checkpoint, contract: dict[str, Any]) -> FastH3 | None:
    """Return what a transformer was distilled for; None if it has no gates.

    Args:
        checkpoint: The checkpoint.
        contract: From `read_contract`. Without one, the list of the transformer's tensors shows whether it has gates.
    """
    if contract:
        levels = tuple(level / _THOUSANDTHS for level in contract["dmd_denoising_steps"])
        return FastH3(float(contract["vsa_sparsity"]), levels)
    files = checkpoint.path("transformer").glob("*.safetensors.index.json")
    tables = [checkpoint.config("transformer", file.name).get("weight_map") for file in files]
    names = [name for table in tables if isinstance(table, dict) for name in table]
    return V1 if any("to_gate_compress" in name for name in names) else None
