"""Manifests as a Kustomize base and an overlay, files that people read, change and keep in git."""

from collections.abc import Mapping
from pathlib import Path

from cluster.errors import LayoutError
from cluster.provision.kubernetes import as_yaml
from cluster.provision.target import Object, Target

_API = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
BASE, OVERLAY = "base", "overlays/production"


def write_kustomization(folder: Path, target: Target, files: Mapping[str, Mapping[str, Object]]) -> list[Path]:
    """Write a base of files, and an overlay that shows what one changes: the image's tag.

    Args:
        folder: Where `base` and `overlays` go. The base is written anew; an overlay that is there stays as it is.
        target: Where the objects run.
        files: By name of the file, its objects, each with a comment.

    Returns:
        The files that were written.

    Raises:
        LayoutError: The folder can't be written to.
    """
    image, _, tag = target.image.rpartition(":")
    has_tag = bool(image) and "/" not in tag and "@" not in image  # Else it is a registry's port, or a digest.
    base: Object = {**_API, "namespace": target.namespace, "resources": sorted(files)}
    overlay: Object = {
        **_API,
        "resources": [f"../../{BASE}"],
        **({"images": [{"name": image, "newTag": tag}]} if has_tag else {}),
    }
    texts = {f"{BASE}/{name}": as_yaml(objects) for name, objects in files.items()}
    texts[f"{BASE}/kustomization.yaml"] = as_yaml({"written anew by wan-tpu manifests --kustomize": base})
    comment = "yours: wan-tpu manifests leaves it as it is\nkubectl apply --kustomize " + OVERLAY
    if not (folder / OVERLAY / "kustomization.yaml").exists():
        texts[f"{OVERLAY}/kustomization.yaml"] = as_yaml({comment: overlay})
    try:
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    except OSError as error:
        raise LayoutError(f"can't write {folder} ({error}); choose another folder") from None
    return [folder / name for name in texts]
