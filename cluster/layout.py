"""A layout: which stages are hosted together, on which kind of slice, how often. Read from a YAML file.

    pools:
      experts:                            # a name
        stages: [denoise_high, denoise_low]
        slice: v6e-8
        replicas: {min: 1, max: 4}        # or one number; 1 when left out
        mesh: {dp: 2, sp: 1, tp: 4}       # over one slice; what is left out is chosen from the model
        batch: 2                          # requests that the slice computes at once; 1 when left out
    emulate:                              # only for emulated clusters
      devices_per_host: 1                 # CPU devices in place of a host's chips

What the stages are called, and in which order they run, is told by the caller: this room knows nothing of video.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.emulated import EmulatedSlice
from cluster.errors import LayoutError, UnknownSlice
from cluster.slice_spec import SliceSpec, kinds

SHIPPED = Path(__file__).parent / "layouts"
AXES = ("dp", "sp", "tp")
MOST_REPLICAS, MOST_TOGETHER = 1000, 64  # beyond these it is a slip of the pen


@dataclass(frozen=True)
class Replicas:
    """Bounds of a pool's replicas, each of which leads a slice."""

    minimum: int = 1
    maximum: int = 1


@dataclass(frozen=True)
class Pool:
    """Stages hosted together, in the order in which they run.

    mesh   sizes of dp, sp and tp, None where open
    batch  requests of equal shape that the slice computes at once at most
    """

    name: str
    stages: tuple[str, ...]
    slice: SliceSpec
    replicas: Replicas = Replicas()
    mesh: tuple[int | None, int | None, int | None] = (None, None, None)
    batch: int = 1


@dataclass(frozen=True)
class Layout:
    """All pools, by name in the order of the file.

    source            the file it was read from, for messages
    devices_per_host  of emulated slices, None where the layout is for real ones
    """

    source: str
    pools: tuple[Pool, ...]
    devices_per_host: int | None = None

    @classmethod
    def load(cls, path: str | Path, stages: Sequence[str], together: Sequence[str] = ()) -> "Layout":
        """Read and validate a layout file, or one that is shipped, by its name.

        stages    all there are, in the order in which they run; each must be in exactly one pool
        together  those of them that can run for several requests at once

        Raises `LayoutError` naming file, pool and remedy.
        """
        path = _find(path)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise LayoutError(f"{path} can't be read ({error})") from None
        return cls.parse(text, str(path), stages, together)

    @classmethod
    def parse(cls, text: str, source: str, stages: Sequence[str], together: Sequence[str] = ()) -> "Layout":
        """Return the layout of a YAML text; the rest as `load`."""
        try:
            content = yaml.load(text, _UniqueKeys)
        except yaml.YAMLError as error:
            raise LayoutError(f"{source} is no YAML: {' '.join(str(error).split())}") from None
        at = _At(source)
        content = at.mapping(content, {"pools", "emulate"}, "the file")
        devices = None
        if "emulate" in content:
            emulate = at.mapping(content["emulate"], {"devices_per_host"}, "emulate")
            devices = at.positive(emulate.get("devices_per_host", 1), "emulate: devices_per_host")
        pools = content.get("pools")
        if not isinstance(pools, dict) or not pools:
            raise at.error("there are no pools; add pools: {NAME: {stages: [...], slice: v6e-8}}")
        layout = cls(source, tuple(_pool(_At(source, name), name, pools[name], devices) for name in pools), devices)
        layout._check_stages(stages)
        layout._check_batches(together)
        return layout

    @property
    def emulated(self) -> bool:
        """Whether CPU devices are meant to stand for the chips."""
        return self.devices_per_host is not None

    def devices(self, pool: Pool) -> int:
        """Return how many JAX devices a slice of that pool has."""
        return _devices(pool.slice, self.devices_per_host)

    def pool_of(self, stage: str) -> Pool:
        """Return the pool that hosts a stage."""
        return next(pool for pool in self.pools if stage in pool.stages)

    def slices(self, *, most: bool = False) -> Iterator[tuple[Pool, int]]:
        """Yield (pool, replica) for every slice that the layout needs at least, or at most."""
        for pool in self.pools:
            for replica in range(pool.replicas.maximum if most else pool.replicas.minimum):
                yield pool, replica

    def emulated_slices(self) -> tuple[EmulatedSlice, ...]:
        """Return what `EmulatedCluster.start` needs for all replicas. Raises `LayoutError` without `emulate:`."""
        if self.devices_per_host is None:
            raise LayoutError(
                f"{self.source}: it is for real TPUs; add emulate: {{devices_per_host: 1}} to emulate it here"
            )
        # Named and numbered by kind, as a cloud would: which pool takes which is the scheduler's choice.
        kinds_of = {pool.slice.pod_type: pool.slice for pool in self.pools}
        wanted = Counter(pool.slice.pod_type for pool, _ in self.slices(most=True))
        return tuple(
            EmulatedSlice(f"{pod_type}-{i}", kinds_of[pod_type], self.devices_per_host)
            for pod_type in wanted
            for i in range(wanted[pod_type])
        )

    def check_memory(self, needs: Mapping[str, float]) -> None:
        """Raise `LayoutError` for a pool whose stages need more memory than its slice has.

        needs  GiB that each stage needs on a whole slice; a stage that isn't named is not checked
        """
        for pool in self.pools:
            need = sum(needs.get(stage, 0.0) for stage in pool.stages)
            if need > pool.slice.hbm_gib:
                larger = [s for s in map(SliceSpec, kinds(pool.slice.chip.name)) if s.hbm_gib >= need]
                remedy = f"take {larger[0]}" if larger else "no kind of this generation is large enough"
                remedy += ", or give its stages pools of their own" if len(pool.stages) > 1 else ""
                raise _At(self.source, pool.name).error(
                    f"{' + '.join(pool.stages)} need {need:.1f} GiB, {pool.slice} has {pool.slice.hbm_gib:g}; {remedy}"
                )

    def _check_stages(self, stages: Sequence[str]) -> None:
        hosts: dict[str, str] = {}
        for pool in self.pools:
            at = _At(self.source, pool.name)
            for stage in pool.stages:
                if stage not in stages:
                    raise at.error(f"there is no stage {stage!r}; stages are {', '.join(stages)}")
                if stage in hosts:
                    where = "twice" if hosts[stage] == pool.name else f"also in pool {hosts[stage]}"
                    raise at.error(f"stage {stage} is there {where}; a stage is in exactly one pool")
                hosts[stage] = pool.name
            ordered = sorted(pool.stages, key=list(stages).index)
            if list(pool.stages) != ordered:
                raise at.error(
                    f"stages {', '.join(pool.stages)} are out of order; write stages: [{', '.join(ordered)}]"
                )
        if missing := [stage for stage in stages if stage not in hosts]:
            raise _At(self.source).error(
                f"no pool hosts {', '.join(missing)}; add a pool with stages: [{', '.join(missing)}]"
            )

    def _check_batches(self, together: Sequence[str]) -> None:
        for pool in self.pools:
            if pool.batch > 1 and not set(pool.stages) & set(together):
                able = ", ".join(together) or "no stage"
                raise _At(self.source, pool.name).error(
                    f"batch is {pool.batch}, and {', '.join(pool.stages)} take one request at a time; leave batch out "
                    f"({able} can take several at once)"
                )


def shipped() -> list[str]:
    """Return the names of the layouts that come with this package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def _find(path: str | Path) -> Path:
    given = Path(path)
    if given.is_file():
        return given
    named = SHIPPED / f"{given.name.removesuffix('.yaml')}.yaml"
    if len(given.parts) == 1 and named.is_file():
        return named
    raise LayoutError(f"there is no layout file {path}; shipped ones, by name: {', '.join(shipped())}")


def _pool(at: "_At", name: Any, content: Any, devices_per_host: int | None) -> Pool:
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        raise at.error("a pool's name is made of letters, digits, - and _")
    content = at.mapping(content, {"stages", "slice", "replicas", "mesh", "batch"}, "the pool")
    stages = content.get("stages")
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, str) for stage in stages):
        raise at.error(f"stages is {stages!r}; write a list of names, such as stages: [encoder]")
    kind = content.get("slice")
    if not isinstance(kind, str):
        raise at.error(f"slice is {kind!r}; write a kind, such as slice: v6e-8")
    try:
        spec = SliceSpec(kind)
    except UnknownSlice as error:
        raise at.error(f"slice: {error}") from None
    return Pool(
        name,
        tuple(stages),
        spec,
        _replicas(at, content.get("replicas", 1)),
        _mesh(at, content.get("mesh", {}), spec, _devices(spec, devices_per_host)),
        at.positive(content.get("batch", 1), "batch", MOST_TOGETHER),
    )


def _devices(spec: SliceSpec, devices_per_host: int | None) -> int:
    return spec.devices if devices_per_host is None else spec.hosts * devices_per_host


def _replicas(at: "_At", given: Any) -> Replicas:
    if isinstance(given, dict):
        content = at.mapping(given, {"min", "max"}, "replicas")
        minimum = at.positive(content.get("min", 1), "replicas: min", MOST_REPLICAS)
        maximum = at.positive(content.get("max", minimum), "replicas: max", MOST_REPLICAS)
        if minimum > maximum:
            raise at.error(f"replicas: min is {minimum}, max {maximum}; exchange them")
        return Replicas(minimum, maximum)
    count = at.positive(given, "replicas", MOST_REPLICAS)
    return Replicas(count, count)


def _mesh(at: "_At", given: Any, spec: SliceSpec, devices: int) -> tuple[int | None, int | None, int | None]:
    content = at.mapping(given, set(AXES), "mesh")
    dp, sp, tp = (None if content.get(a) is None else at.positive(content[a], f"mesh: {a}") for a in AXES)
    fixed = [size for size in (dp, sp, tp) if size is not None]
    product = math.prod(fixed)
    what = f"{spec} has {devices} device{'s' if devices > 1 else ''}" + (
        "" if devices == spec.devices else f" when it is emulated ({spec.devices} when not)"
    )
    if devices % product:
        raise at.error(f"mesh {_sizes(dp, sp, tp)} doesn't divide the slice: {what}; leave mesh out to have it chosen")
    if len(fixed) == len(AXES) and product != devices:
        raise at.error(
            f"mesh {_sizes(dp, sp, tp)} uses {product} of the slice's devices: {what}; "
            f"make the product {devices}, or take a smaller slice"
        )
    return dp, sp, tp


def _sizes(*sizes: int | None) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True) if size is not None)


@dataclass(frozen=True)
class _At:
    """Where in a file something was found, for messages."""

    source: str
    pool: Any = None

    def error(self, message: str) -> LayoutError:
        return LayoutError(f"{self.source}: " + (f"pool {self.pool}: " if self.pool is not None else "") + message)

    def mapping(self, value: Any, allowed: set[str], what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{what} is {value!r}; write keys and values ({', '.join(sorted(allowed))})")
        if unknown := [key for key in value if key not in allowed]:
            raise self.error(f"{what} has {', '.join(map(repr, unknown))}; known here: {', '.join(sorted(allowed))}")
        return value

    def positive(self, value: Any, what: str, most: int | None = None) -> int:
        if type(value) is not int or value < 1 or (most is not None and value > most):
            raise self.error(f"{what} is {value!r}; write a whole number from 1" + (f" to {most}" if most else ""))
        return value


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets the last of two equal keys win, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is there twice", node.value[i][0].start_mark
                )
        return super().construct_mapping(node, deep)
