"""A model on devices: its weights, loaded when a stage first needs them, and its compiled programs."""

import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from jax.sharding import Mesh

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import InvalidInput
from wan_tpu.lora import Lora
from wan_tpu.progress import BYTES, Progress, Silent
from wan_tpu.runtime.components import DTYPES, MATRICES, Component, Loaded, load_component, open_component
from wan_tpu.runtime.program import ExecutableStore, Program


class HasComponents(Protocol):
    """What a runtime needs of a model; stages need more."""

    checkpoint: Checkpoint | None

    @property
    def components(self) -> dict[str, Component]:
        """Every component by the name of the work it does."""


class AdapterStore(Protocol):
    """Where weights with adapters applied come from: `wan_tpu.adapters.merging.Adapters`."""

    def read(self, component: Component, base: Loaded, lora: Lora) -> Any:
        """Read an adapter's file into host memory; raises `InvalidRequest`."""

    def get(self, name: str, loras: tuple[Lora, ...]) -> Loaded | None:
        """Return a component with adapters applied, if it is kept."""

    def merge(self, runtime: "Runtime[Any]", name: str, base: Loaded, loras: tuple[Lora, ...], *, keep: bool) -> Loaded:
        """Apply adapters to a component; keep: its base."""

    def drop(self, name: str) -> None:
        """Let go of what was merged of a component."""


def check_precision(model: HasComponents, precision: str) -> None:
    """Raise `InvalidInput` for a precision that a model doesn't have."""
    if precision not in DTYPES:
        raise InvalidInput(f"dtype {precision!r} is unknown; choose one of {', '.join(DTYPES)}")
    offered = [one for one in DTYPES if one not in MATRICES or any(c.offers(one) for c in model.components.values())]
    if precision not in offered:
        raise InvalidInput(f"this model isn't computed in {precision}; choose one of {', '.join(offered)}")


M = TypeVar("M", bound=HasComponents)


class Runtime(Generic[M]):
    """Weights and programs of one model on one mesh.

    load_s      seconds spent reading weights, by component
    on_compile  given the name of a program before it is compiled, and None after
    programs    compiled programs by name; each knows the seconds its compilations took
    """

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
        """Raise `InvalidInput` for a precision that the model doesn't have.

        keep_weights: keep a component's weights after its stage (a server), or free them (one request).

        executables  where compiled programs are looked for before they are compiled
        adapters     applies adapters; without, there are none
        progress     shows the bytes of weights that are read
        """
        check_precision(model, dtype)
        self.model = model
        self.mesh = mesh
        self.dtype = dtype
        self.load_s: dict[str, float] = {}
        self._keep_weights = keep_weights
        self._executables = executables
        self._adapters = adapters
        self._progress = progress
        self._components: dict[str, Loaded] = {}
        self._checked: set[str] = set()
        self._loading = threading.Lock()
        self.programs: dict[str, Program] = {}
        self.on_compile: Callable[[str | None], object] = lambda name: None

    def component(self, name: str, loras: tuple[Lora, ...] = ()) -> Loaded:
        """Return a component, read from the checkpoint if it isn't on the devices; loras: applied to it."""
        if not loras:
            return self._base(name)
        assert self._adapters is not None
        found = self._adapters.get(name, loras)
        if found is None:
            found = self._adapters.merge(self, name, self._base(name), loras, keep=self._keep_weights)
            if not self._keep_weights:
                self._components.pop(name)  # it has been changed
        return found

    def read_adapters(self, name: str, loras: tuple[Lora, ...]) -> None:
        """Read the files of adapters for a component into host memory; raises `InvalidRequest`. On any thread."""
        for lora in loras:
            assert self._adapters is not None
            self._adapters.read(self.model.components[name], self._base(name), lora)

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

    def check(self, names: Iterable[str]) -> None:
        """Compare the headers of components' files with their modules, once; raises `CheckpointError`."""
        with self._loading:
            for name in set(names) - self._checked:
                assert self.model.checkpoint is not None
                open_component(self.model.checkpoint, self.model.components[name], self.dtype, self.mesh)
                self._checked.add(name)

    def done_with(self, name: str) -> None:
        """Free a component's weights, unless they are kept. Programs stay: they hold no weights."""
        if not self._keep_weights:
            self._components.pop(name, None)
            if self._adapters is not None:
                self._adapters.drop(name)

    def program(self, name: str, function: Callable[..., Any], results: Any = None) -> Program:
        """Return the program of this name, made from `function` the first time."""
        if name not in self.programs:
            exact = self.dtype == "float32"
            self.programs[name] = Program(
                function,
                self.mesh,
                exact=exact,
                results=results,
                name=name,
                executables=self._executables,
                told=lambda program: self.on_compile(program),
            )
        return self.programs[name]

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far, over all programs."""
        return sum(program.compile_s for program in list(self.programs.values()))  # others may add some meanwhile
