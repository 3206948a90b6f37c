"""Compiled programs in a folder: made ahead of time, loaded in place of compiling.

One file holds one program: a line of JSON with what it was made from, then the serialised executable. A file is used
only where all of that is the same; otherwise the program is compiled, and the log says why.

Loading runs code from the files: only folders that you trust.
"""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from wan_tpu.aot import key
from wan_tpu.errors import InvalidInput, OutputError

SUFFIX = ".executable"
_log = logging.getLogger(__name__)


class Executables:
    """The executables of one model's programs in a folder."""

    def __init__(self, folder: Path, settings: str, *, save: bool = False) -> None:
        """settings: as in `key.what`; save: store what has to be compiled.

        Raises `InvalidInput` when the folder to load from doesn't exist, `OutputError` when it can't be made.
        """
        self._folder = folder
        self._settings = settings
        self._save = save
        if not save and not folder.is_dir():
            raise InvalidInput(f"{folder} is no folder of executables; make one with scripts/precompile.py")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"can't make the folder {folder} ({error.strerror})") from None

    def get(self, name: str, args: Any, mesh: Mesh, build: Callable[[], Any]) -> Any:
        """Return the executable of a program for arguments like these; `build` is called when none is stored.

        args  the positional arguments: arrays, or shapes with shardings
        """
        asked = key.what(name, args, mesh, self._settings)
        path = self.path(asked)
        loaded = self._load(path, asked, mesh)
        if loaded is not None:
            return loaded
        if not self._save:
            return build()
        with _compiled_anew():
            built = build()
            _write(path, {"what": asked, "made_by": key.made_by()}, built)
        return built

    def path(self, asked: key.Ingredients) -> Path:
        """Return where the program that `key.what` describes is kept."""
        plain = re.sub(r"\W+", "-", asked["program"].split(",")[0])
        return self._folder / f"{plain}-{key.digest(json.dumps(asked, sort_keys=True))}{SUFFIX}"

    def _load(self, path: Path, asked: key.Ingredients, mesh: Mesh) -> Any | None:
        level = logging.WARNING
        try:
            header, payload = _read(path)
            reason = "; ".join(key.differences(header["made_by"], key.made_by()))
            if not reason:
                executable, in_tree, out_tree = pickle.loads(payload)
                return serialize_executable.deserialize_and_load(
                    executable, in_tree, out_tree, mesh.devices.flat[0].client, list(mesh.devices.flat)
                )
        except FileNotFoundError:
            reason = "there is none for these shapes, this mesh and this model"
            level = logging.INFO if self._save else logging.WARNING
        except Exception as error:  # a damaged file, or whatever a runtime makes of one from another version
            reason = f"{path.name} can't be loaded ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        _log.log(level, "compiling %s, no stored executable is used: %s", asked["program"], reason)
        return None


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Keep JAX's own cache of compiled programs away: what comes from there can't be stored again whole (CPU, 0.10)."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or it goes on as it was
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    head, _, payload = path.read_bytes().partition(b"\n")
    header = json.loads(head)
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise ValueError("its checksum is wrong")
    return header, payload


def _write(path: Path, header: dict[str, Any], compiled: Any) -> None:
    payload = pickle.dumps(serialize_executable.serialize(compiled))
    head = json.dumps(header | {"sha256": hashlib.sha256(payload).hexdigest()})
    partial = path.with_suffix(f".{os.getpid()}.partial")  # appears whole, whoever writes beside us
    partial.write_bytes(head.encode() + b"\n" + payload)
    partial.replace(path)
