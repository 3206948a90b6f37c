"""A model on devices: its weights, loaded when a stage first needs them, and its compiled programs."""

import contextlib
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from jax.sharding import Mesh

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import InvalidInput
from wan_tpu.progress import BYTES, Progress, Silent
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.runtime.components import (
    DTYPES,
    MATRICES,
    Component,
    Loaded,
    abstract_component,
    load_component,
    open_component,
)
from wan_tpu.runtime.program import ExecutableStore, Program


class HasComponents(Protocol):
    """The part of a model that a runtime needs; stages need more."""

    checkpoint: Checkpoint | None
    adapted_encoders: tuple[str, ...]

    @property
    def components(self) -> dict[str, Component]:
        """Every component, by the name of its role."""

    @property
    def same_weights(self) -> Mapping[str, str]:
        """Components that share another component's weights, by name."""

    def prepare(self, component: str) -> None:
        """Read the files, other than weights, that the host needs for a component, such as a tokenizer's."""


@dataclass(frozen=True)
class FetchedAdapter(RequestedAdapter):
    """A request's adapter with its file's content at the time it was fetched. The file isn't read again."""

    checksum: str = field(kw_only=True)  # A checksum of the content, independent of where the file is.
    adapter: Any = field(kw_only=True, compare=False, repr=False)  # The content, a `wan_tpu.adapters.adapter.Adapter`.


def list_adapter_warnings(adapters: Iterable[RequestedAdapter]) -> list[str]:
    """Return what the files of a request's fetched adapters ask for that isn't done."""
    return [text for adapter in adapters if isinstance(adapter, FetchedAdapter) for text in adapter.adapter.warnings]


class AdapterStore(Protocol):
    """Provides weights with adapters applied: `wan_tpu.adapters.merging.AdapterCache`."""

    def fetch(self, component: Component, base: Loaded, adapter: RequestedAdapter) -> FetchedAdapter:
        """Read an adapter's file into host memory.

        Args:
            base: The component's weights, or their shapes.

        Raises:
            InvalidRequest: The adapter doesn't fit the component.
            Unavailable: The file can't be read now.
        """

    def get(self, name: str, adapters: tuple[FetchedAdapter, ...]) -> Loaded | None:
        """Return a component with adapters applied, if there is one."""

    def merge(
        self, runtime: "Runtime[Any]", name: str, base: Loaded, adapters: tuple[FetchedAdapter, ...], *, keep: bool
    ) -> Loaded:
        """Apply adapters to a component; with `keep`, its base weights stay unchanged."""

    def drop(self, name: str) -> None:
        """Release the merged weights of a component."""


def check_precision(model: HasComponents, precision: str) -> None:
    """Raise `InvalidInput` for a precision that a model doesn't have."""
    if precision not in DTYPES:
        raise InvalidInput(f"dtype {precision!r} is unknown; choose one of {', '.join(DTYPES)}")
    components = model.components.values()
    choices = [name for name in DTYPES if name not in MATRICES or any(part.offers(name) for part in components)]
    if precision not in choices:
        raise InvalidInput(f"this model doesn't support {precision}; choose one of {', '.join(choices)}")


M = TypeVar("M", bound=HasComponents)

# The number of programs that a runtime keeps. Some have a request's numbers in their names; apart from those, a model's
# stages have about thirty names.
MAX_PROGRAMS = 64


class Runtime(Generic[M]):
    """Weights and programs of one model on one mesh."""

    def __init__(
        self,
        model: M,
        mesh: Mesh,
        dtype: str,
        *,
        keep_weights: bool,
        executables: ExecutableStore | None = None,
        adapters: AdapterStore | None = None,
        progress: Progress = Silent(),  # noqa: B008 (has no state)
    ) -> None:
        """Start without any weights or programs.

        Args:
            keep_weights: Keep a component's weights after its stage (a server), or free them (a single request).
            executables: Where to look for compiled programs before compiling them.
            adapters: Applies adapters. Without it, no request may have any.
            progress: Shows the bytes of weights that are read.

        Raises:
            InvalidInput: The model doesn't have that precision.
        """
        check_precision(model, dtype)
        self.model = model
        self.mesh = mesh
        self.dtype = dtype
        self.load_s: dict[str, float] = {}  # Seconds spent reading weights and tokenizers, by component.
        self.host_s = 0.0  # Seconds during which the host worked while the devices were idle.
        self._keep_weights = keep_weights
        self._executables = executables
        self._adapters = adapters
        self._progress = progress
        self._components: dict[str, Loaded] = {}
        self._abstract: dict[str, Loaded] = {}  # Shapes of components whose adapters were read before the weights.
        self._checked: set[str] = set()
        self._prepared: set[str] = set()
        self._loading = threading.Lock()
        self._naming = threading.Lock()
        self._dropped_compile_s = 0.0
        # The latest `MAX_PROGRAMS` programs by name; each knows how many seconds its compilations took.
        self.programs: OrderedDict[str, Program] = OrderedDict()
        # Called with the name of a program before it is compiled, and with None after.
        self.on_compile: Callable[[str | None], object] = lambda name: None

    def component(self, name: str, adapters: tuple[RequestedAdapter, ...] = ()) -> Loaded:
        """Return a component, read from the checkpoint if it isn't on the devices.

        Args:
            adapters: Adapters to apply. Those from `fetch_adapters` have the content that was fetched; the files of
                others are read now.
        """
        name = self.model.same_weights.get(name, name)
        if not adapters:
            return self._base(name)
        assert self._adapters is not None
        fetched = tuple(self._fetch(name, adapter) for adapter in adapters)
        merged = self._adapters.get(name, fetched)
        if merged is None:
            base = self._base(name)
            if not self._keep_weights:
                # The weights are changed in place. If that is interrupted, no other request may get half-changed
                # weights.
                with self._loading:
                    self._components.pop(name, None)
            merged = self._adapters.merge(self, name, base, fetched, keep=self._keep_weights)
        return merged

    def fetch_adapters(
        self, adapters: tuple[RequestedAdapter, ...], names: Sequence[str]
    ) -> tuple[RequestedAdapter, ...]:
        """Return adapters with their files' current content; those for none of the `names` are unchanged.

        Any thread may call this. It may wait for a disk or the network; `component` never waits for adapters returned
        here.

        Raises:
            InvalidRequest: An adapter doesn't fit its component.
            Unavailable: A file can't be read now.
        """
        stages = [next((name for name in names if adapter.is_for(name)), None) for adapter in adapters]
        return tuple(
            adapter if stage is None else self._fetch(stage, adapter)
            for adapter, stage in zip(adapters, stages, strict=True)
        )

    def fetch_text_adapters(self, adapters: Iterable[RequestedAdapter]) -> dict[str, tuple[RequestedAdapter, ...]]:
        """Return what a request's adapters change of the encoder stage, by component; as `fetch_adapters` otherwise."""
        plain = [RequestedAdapter(adapter.path, adapter.scale) for adapter in adapters if adapter.is_for_all]
        fetched: dict[str, tuple[RequestedAdapter, ...]] = {}
        for name in self.model.adapted_encoders:
            contents = [self._fetch(name, adapter) for adapter in plain]
            changing = tuple(x for x in contents if isinstance(x, FetchedAdapter) and x.adapter.changes_something)
            fetched |= {name: changing} if changing else {}
        return fetched

    def _fetch(self, name: str, adapter: RequestedAdapter) -> FetchedAdapter:
        if isinstance(adapter, FetchedAdapter):
            return adapter
        assert self._adapters is not None
        return self._adapters.fetch(self.model.components[name], self._weights_or_shapes(name), adapter)

    def _weights_or_shapes(self, name: str) -> Loaded:
        """Return a component's weights if they are loaded, else their shapes, which are enough to read an adapter."""
        if (loaded := self._components.get(name)) is not None:
            return loaded
        if name not in self._abstract:
            self._abstract[name] = abstract_component(self.model.components[name], self.dtype, self.mesh)
        return self._abstract[name]

    def _base(self, name: str) -> Loaded:
        with self._loading:
            if name not in self._components:
                assert self.model.checkpoint is not None
                start = time.perf_counter()
                show = functools.partial(self._progress.bar, f"read {name}", unit=BYTES)
                component = self.model.components[name]
                loaded = load_component(self.model.checkpoint, component, self.dtype, self.mesh, show)
                self._components[name] = loaded
                self.load_s[name] = self.load_s.get(name, 0.0) + time.perf_counter() - start
            return self._components[name]

    def prepare(self, name: str) -> None:
        """Read once the files, other than weights, that the host needs for a component; raises `CheckpointError`."""
        with self._loading:
            if name not in self._prepared:
                start = time.perf_counter()
                self.model.prepare(name)
                self.load_s[name] = self.load_s.get(name, 0.0) + time.perf_counter() - start
                self._prepared.add(name)

    @contextlib.contextmanager
    def time_host_work(self) -> Iterator[None]:
        """Count the time spent in the block as the host's, during which the devices wait."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.host_s += time.perf_counter() - start

    def check(self, names: Iterable[str]) -> None:
        """Compare the headers of components' files with their modules, once per component; raises `CheckpointError`."""
        with self._loading:
            for name in set(names) - self._checked:
                assert self.model.checkpoint is not None
                open_component(self.model.checkpoint, self.model.components[name], self.dtype, self.mesh)
                self._checked.add(name)

    def release_weights(self, name: str) -> None:
        """Free a component's weights, unless they are kept. Its programs stay, because they hold no weights."""
        name = self.model.same_weights.get(name, name)
        if not self._keep_weights:
            self._components.pop(name, None)
            if self._adapters is not None:
                self._adapters.drop(name)

    def program(self, name: str, function: Callable[..., Any], results: Any = None) -> Program:
        """Return the program of this name, which wraps the `function` passed when it was first requested."""
        with self._naming:
            program = self.programs.get(name)  # It is never taken out: Ctrl-C may come at any time.
            if program is None:
                program = self.programs[name] = Program(
                    function,
                    self.mesh,
                    exact=self.dtype == "float32",
                    results=results,
                    name=name,
                    executables=self._executables,
                    on_compile=lambda program: self.on_compile(program),
                )
            self.programs.move_to_end(name)  # The one used last comes last.
            if len(self.programs) > MAX_PROGRAMS:
                self._dropped_compile_s += self.programs.popitem(last=False)[1].compile_s
            return program

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far, over all programs."""
        with self._naming:
            return self._dropped_compile_s + sum(program.compile_s for program in self.programs.values())
