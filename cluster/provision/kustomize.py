"""Write manifests as a Kustomize base and overlays: files that people read, change and keep in git.

An overlay contains how the objects for other arguments differ from the base: JSON patches, additional objects, and
objects to delete.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import LayoutError
from cluster.provision.kubernetes import format_yaml
from cluster.provision.target import Object, Target
from cluster.readable_yaml import dump_yaml

_API = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_FILE = "kustomization.yaml"
BASE, OVERLAYS, PRODUCTION = "base", "overlays", "production"
_WRITE_BASE = "write it first, with wan-tpu manifests --kustomize and without --overlay"


def write_base(folder: Path, target: Target, files: Mapping[str, Mapping[str, Object]]) -> list[Path]:
    """Write a base, and an overlay that changes the image's tag, as an example.

    Args:
        folder: Where the folders `base` and `overlays` are. The base is overwritten; an existing overlay is kept.
        files: For each file of the base, by its name, the objects in it, by the comment for each.

    Returns:
        The paths of the files that were written.

    Raises:
        LayoutError: The folder can't be written to.
    """
    base: Object = {**_API, "namespace": target.namespace, "resources": sorted(files)}
    texts = {f"{BASE}/{name}": format_yaml(objects) for name, objects in files.items()}
    texts[f"{BASE}/{_FILE}"] = format_yaml({"overwritten by wan-tpu manifests --kustomize": base})
    overlay = f"{OVERLAYS}/{PRODUCTION}"
    if not (folder / overlay / _FILE).exists():
        comment = f"yours to edit: wan-tpu manifests doesn't overwrite it\nkubectl apply --kustomize {overlay}"
        name, tag = _split_image(target.image)
        images = [{"name": name, **tag}] if "newTag" in tag else []
        content = {**_API, "resources": [f"../../{BASE}"], **({"images": images} if images else {})}
        texts[f"{overlay}/{_FILE}"] = format_yaml({comment: content})
    return _write(folder, texts)


def read_image(folder: Path, name: str) -> str:
    """Return the image of the containers of a base, which overlays replace by their own.

    Args:
        folder: Where the folder `base` is.
        name: The name of the base's objects, from --name.

    Raises:
        LayoutError: There is no base, or its objects have another name.
    """
    objects = _read_base(folder)
    for (kind, base_name), content in objects.items():
        if kind.startswith("Ray") and base_name == name:
            spec = content["spec"]
            cluster = spec.get("rayClusterConfig") or spec.get("rayClusterSpec") or spec
            return str(cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"])
    names = sorted({base_name for kind, base_name in objects if kind.startswith("Ray")})
    if not names:
        raise LayoutError(f"{folder / BASE} has no Ray object; {_WRITE_BASE}")
    raise LayoutError(
        f"{folder / BASE} was written with --name {names[0]}, not {name}; give an overlay the same --name"
    )


def write_overlay(
    folder: Path, overlay: str, target: Target, image: str, files: Mapping[str, Mapping[str, Object]]
) -> list[Path]:
    """Write, or overwrite, an overlay that turns the base into other objects.

    Args:
        folder: Where the folder `base` is, from `write_base`.
        target: The cluster's settings, with the base's image.
        files: The objects that the overlay is to produce, in the form of `write_base`.

    Returns:
        The paths of the files that were written.

    Raises:
        LayoutError: There is no base, or the folder can't be written to.
    """
    base = _read_base(folder)
    objects_by_id = {_identify(item): item for objects in files.values() for item in objects.values()}
    overlay_folder = f"{OVERLAYS}/{overlay}"
    texts: dict[str, str] = {}
    resources, patches = [f"../../{BASE}"], list[Object]()
    for name, objects in files.items():
        added = {comment: item for comment, item in objects.items() if _identify(item) not in base}
        if added:
            texts[f"{overlay_folder}/{name}"] = format_yaml(added)
            resources.append(name)
    for kind, name in sorted(base):
        content = base[kind, name]
        if (kind, name) not in objects_by_id:
            removed = {"apiVersion": content["apiVersion"], "kind": kind, "metadata": {"name": name}}
            patches.append({"patch": dump_yaml({**removed, "$patch": "delete"})})
            continue
        # The kustomization sets the namespace of all objects, so it needs no patches.
        after = objects_by_id[kind, name]
        after = after | {"metadata": after["metadata"] | {"namespace": content["metadata"]["namespace"]}}
        if operations := [*_compare(content, after)]:
            file = f"{kind.lower()}-{name}.yaml"
            texts[f"{overlay_folder}/{file}"] = dump_yaml(operations)
            patches.append({"target": {"kind": kind, "name": name}, "path": file})
    content = {
        **_API,
        "namespace": target.namespace,
        "resources": resources,
        **({"patches": patches} if patches else {}),
        **({"images": [_replace_image(target.image, image)]} if image != target.image else {}),
    }
    comment = f"written by wan-tpu manifests --overlay {overlay}\nkubectl apply --kustomize {overlay_folder}"
    texts[f"{overlay_folder}/{_FILE}"] = format_yaml({comment: content})
    for stale in (folder / overlay_folder).glob("*.yaml"):
        stale.unlink()
    return _write(folder, texts)


def _compare(before: Any, after: Any, path: str = "") -> Iterator[Object]:
    """Yield the JSON patch operations (RFC 6902) that turn a value into another.

    A list that only grows gets additional entries. Lists whose entries have the same names are compared entry by entry,
    and all other lists are replaced. Before an entry is patched, its name is tested, so that applying the overlay fails
    if the order of the base has changed.

    Args:
        after: The value that the overlay is to produce.
        path: The location of the value in its object, as a JSON pointer.
    """
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (*before, *(key for key in after if key not in before)):
            part = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in after:
                yield {"op": "remove", "path": part}
            elif key not in before:
                yield {"op": "add", "path": part, "value": after[key]}
            else:
                yield from _compare(before[key], after[key], part)
    elif isinstance(before, list) and isinstance(after, list) and after[: len(before)] == before:
        for item in after[len(before) :]:
            yield {"op": "add", "path": f"{path}/-", "value": item}
    elif _list_names(before) and _list_names(before) == _list_names(after):
        for number, (key, name) in enumerate(_list_names(before)):
            if operations := [*_compare(before[number], after[number], f"{path}/{number}")]:
                yield {"op": "test", "path": f"{path}/{number}/{key}", "value": name}
                yield from operations
    else:
        yield {"op": "replace", "path": path, "value": after}


def _list_names(value: Any) -> list[tuple[str, str]]:
    """Return the field and the name of each entry of a list, or [] if it isn't a list of objects with names."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return []
    names = [next(((key, item[key]) for key in ("groupName", "name") if key in item), None) for item in value]
    return [name for name in names if name] if all(names) else []


def _identify(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _replace_image(before: str, after: str) -> Object:
    """Return the entry in a kustomization's `images` that replaces an image by another."""
    (name, _), (new, version) = _split_image(before), _split_image(after)
    return {"name": name, **({"newName": new} if new != name else {}), **version}


def _split_image(image: str) -> tuple[str, dict[str, str]]:
    """Return an image's name, and its digest or tag by the field for it in a kustomization."""
    name, _, digest = image.partition("@")
    if digest:
        return name, {"digest": digest}
    name, _, tag = image.rpartition(":")
    # With a slash after the colon, it is a registry's port.
    return (name, {"newTag": tag}) if name and "/" not in tag else (image, {})


def _read_base(folder: Path) -> dict[tuple[str, str], Object]:
    try:
        names = yaml.safe_load((folder / BASE / _FILE).read_text())["resources"]
        items = [item for name in names for item in yaml.safe_load_all((folder / BASE / name).read_text())]
    except OSError as error:
        raise LayoutError(f"{folder} has no {BASE} ({error.strerror}); {_WRITE_BASE}") from None
    except (yaml.YAMLError, KeyError, TypeError):
        raise LayoutError(f"{folder / BASE} is damaged; {_WRITE_BASE}") from None
    return {_identify(item): item for item in items}


def _write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    try:
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    except OSError as error:
        raise LayoutError(f"can't write to {folder} ({error.strerror}); choose another folder") from None
    return [folder / name for name in texts]
