"""Write the trained model as a diffusers directory."""

from pathlib import Path

from .experts import load_model, pipeline_of
from .training import Run

LARGEST_MB = 20


def export(run: Run, target: Path) -> float:
    """Write the model into `target`, weights in float16; return its size in MB.

    Raises SystemExit when it is larger than the repository has room for.
    """
    pipeline = pipeline_of(load_model(run))
    for name in ("text_encoder", "transformer", "transformer_2", "vae"):
        # Not to(): diffusers keeps some parameters in float32 then, which takes a fifth more room.
        for parameter in getattr(pipeline, name).parameters():
            parameter.data = parameter.data.half()
    pipeline.save_pretrained(target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) / 1e6
    if size > LARGEST_MB:
        raise SystemExit(f"error: {target} takes {size:.1f} MB; at most {LARGEST_MB} may be shipped")
    return size
