"""Layouts: which stages share a slice, on which kind of slice, with how many replicas. They are read from YAML files.

    pools:
      experts:                            # a name
        stages: [denoise_high, denoise_low]
        slice: v6e-8
        replicas: {min: 1, max: 4}        # or one number; the default is 1
        mesh: {dp: 2, sp: 1, tp: 4}       # over one slice; the model chooses the axes that you omit
    emulate:                              # only for emulated clusters
      devices_per_host: 1                 # CPU devices in place of a host's chips

A stage's name may be any string here; `Layout.check_stages` compares the names with those of a model.
"""

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator

from cluster.errors import LayoutError
from cluster.slice_spec import SliceSpec
from cluster.yaml_values import parse_yaml, validate

SHIPPED = Path(__file__).parent / "layouts"
MAX_COUNT = 1000  # The most replicas of a pool, or devices along an axis. A larger number must be a typing error.

_Count = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
_STRICT = ConfigDict(extra="forbid")


class Mesh(NamedTuple):
    """Devices along each axis of a slice's mesh (data, sequence and tensor parallel); None where the model decides."""

    dp: _Count | None = None
    sp: _Count | None = None
    tp: _Count | None = None

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self._asdict().items() if size is not None)


_OPEN = Mesh()


@dataclass(frozen=True)
class Replicas:
    """Bounds of a pool's replicas, each of which leads a slice."""

    __pydantic_config__ = _STRICT

    minimum: Annotated[_Count, Field(validation_alias="min")] = 1
    maximum: Annotated[_Count, Field(validation_alias="max")] = 1

    def __post_init__(self) -> None:
        if self.minimum > self.maximum:
            raise ValueError(f"min is {self.minimum}, but max is {self.maximum}; swap them")

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum} to {self.maximum}"


def _read_bounds(bounds: Any) -> Any:
    """Return both bounds of a file's value, which is one number, or min and max."""
    return {"max": bounds.get("min", 1)} | bounds if isinstance(bounds, dict) else {"min": bounds, "max": bounds}


@dataclass(frozen=True)
class Pool:
    """Stages hosted together, in the order in which they run."""

    __pydantic_config__ = _STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    stages: Annotated[tuple[str, ...], Field(min_length=1)]
    slice: Annotated[SliceSpec, PlainValidator(SliceSpec)]
    replicas: Annotated[Replicas, BeforeValidator(_read_bounds)] = Replicas()
    mesh: Mesh = _OPEN


@dataclass(frozen=True)
class Layout:
    """All pools of a layout, in the order of its file."""

    source: str  # The file that it was read from, for messages.
    pools: tuple[Pool, ...]
    devices_per_host: int | None = None  # CPU devices of each emulated host; None if the layout is for real slices.

    @classmethod
    def load(cls, path: str | Path) -> "Layout":
        """Read a layout from a file, or a shipped layout by its name.

        Raises:
            LayoutError: It can't be read or used; the message names file, pool and remedy.
        """
        path = _find_file(path)
        try:
            return cls.parse(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise LayoutError(f"{path} can't be read ({error})") from None

    @classmethod
    def parse(cls, text: str, source: str) -> "Layout":
        """Return the layout that a YAML text describes.

        Args:
            text: The content of a layout file.
            source: What messages call the file.

        Raises:
            LayoutError: As in `load`.
        """
        try:
            file = validate(_File, parse_yaml(text), _REMEDIES)
        except ValueError as error:
            raise LayoutError(f"{source}: {error}") from None
        devices_per_host = None if file.emulate is None else file.emulate.get("devices_per_host", 1)
        layout = cls(source, tuple(file.pools.values()), devices_per_host)
        for pool in layout.pools:
            layout._check_mesh(pool)
            for stage in pool.stages:
                if (other := layout.find_pool(stage)) is not pool or pool.stages.count(stage) > 1:
                    where = "twice" if other is pool else f"also in pool {other.name}"
                    raise layout._build_error(
                        f"stage {stage} is listed {where}; list each stage in exactly one pool", pool
                    )
        return layout

    def devices(self, pool: Pool) -> int:
        """Return how many JAX devices each slice of a pool has."""
        return pool.slice.devices if self.devices_per_host is None else pool.slice.hosts * self.devices_per_host

    @property
    def slices(self) -> int:
        return sum(pool.replicas.maximum for pool in self.pools)

    def find_pool(self, stage: str) -> Pool:
        return next(pool for pool in self.pools if stage in pool.stages)

    @property
    def stages(self) -> frozenset[str]:
        """All stages that are hosted."""
        return frozenset(stage for pool in self.pools for stage in pool.stages)

    def check_stages(self, stages: Sequence[str], optional: Collection[str] = ()) -> None:
        """Raise `LayoutError` unless the pools host these stages, each pool in their order, and no others.

        Args:
            stages: All stages of a model.
            optional: Those that may be left out.
        """
        for pool in self.pools:
            if unknown := [stage for stage in pool.stages if stage not in stages]:
                raise self._build_error(
                    f"the model has no stage {', '.join(unknown)}; it has {', '.join(stages)}", pool
                )
            ordered = sorted(pool.stages, key=list(stages).index)
            if list(pool.stages) != ordered:
                raise self._build_error(f"stages are out of order; write stages: [{', '.join(ordered)}]", pool)
        if missing := ", ".join(stage for stage in stages if stage not in {*self.stages, *optional}):
            raise self._build_error(f"no pool hosts {missing}; add a pool with stages: [{missing}]")

    def _check_mesh(self, pool: Pool) -> None:
        devices, product = self.devices(pool), math.prod(size or 1 for size in pool.mesh)
        if devices == product or (None in pool.mesh and devices % product == 0):
            return
        emulated = "" if self.devices_per_host is None else f" when it is emulated ({pool.slice.devices} when not)"
        problem = f"mesh {pool.mesh} needs {product} devices, but {pool.slice} has {devices}{emulated}"
        raise self._build_error(f"{problem}; make the product {devices}, or leave mesh out to have it chosen", pool)

    def _build_error(self, message: str, pool: Pool | None = None) -> LayoutError:
        return LayoutError(f"{self.source}: {'' if pool is None else f'pool {pool.name}: '}{message}")


def list_shipped() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _find_file(path: str | Path) -> Path:
    requested = Path(path)
    if requested.is_file():
        return requested
    bundled = SHIPPED / f"{requested.name.removesuffix('.yaml')}.yaml"
    if len(requested.parts) == 1 and bundled.is_file():
        return bundled
    close = difflib.get_close_matches(requested.name.removesuffix(".yaml").replace("_", "-"), list_shipped(), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise LayoutError(f"there is no layout file {path}{hint}; shipped layouts: {', '.join(list_shipped())}")


def _put_names_in(pools: Any) -> Any:
    """Copy each pool's name, which is its key in the file, into its fields; pydantic refuses other forms afterwards."""
    if isinstance(pools, dict) and all(isinstance(fields, dict) for fields in pools.values()):
        return {name: fields | {"name": name} for name, fields in pools.items()}
    return pools


@dataclass(frozen=True)
class _File:
    __pydantic_config__ = _STRICT

    pools: Annotated[dict[str, Pool], Field(min_length=1), BeforeValidator(_put_names_in)]
    emulate: dict[Literal["devices_per_host"], _Count] | None = None


# What to write instead, by the last key on the path to the invalid value.
_REMEDIES: dict[Any, str] = {
    _File: "write pools, and emulate for an emulated cluster",
    "pools": "write pools: {NAME: {stages: [...], slice: v6e-8}}, with replicas and mesh where needed",
    "name": "a pool's name is made of letters, digits, - and _",
    "stages": "write a list of names, such as stages: [encoder]",
    "replicas": "write one number, or {min: 1, max: 4}",
    "mesh": "write sizes of dp, sp and tp, such as mesh: {dp: 2, tp: 4}",
    "emulate": "write emulate: {devices_per_host: 1}",
    **dict.fromkeys(("min", "max", *Mesh._fields, "devices_per_host"), f"write a whole number from 1 to {MAX_COUNT}"),
}
