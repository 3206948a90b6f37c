"""What a chip costs an hour: a dated table with its source, which a user can replace."""

import datetime
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cluster.errors import PriceError
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from cluster.yaml_values import parsed, validated

_Dollars = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Prices:
    """US dollars a chip and hour by generation, capacity ("on-demand", "spot") and region; date: when they held."""

    date: datetime.date
    chips: dict[str, dict[str, dict[str, _Dollars]]]

    @classmethod
    def load(cls, path: Path | None = None) -> "Prices":
        """Read a table, the shipped one where no other is given; raises `PriceError`."""
        source = resources.files("cluster.costs") / "prices.yaml" if path is None else path
        try:
            return validated(cls, parsed(source.read_text()), {cls: _FORM})
        except OSError as error:
            raise PriceError(f"{source} can't be read ({error.strerror})") from None
        except ValueError as error:
            raise PriceError(f"{source}: {error}") from None

    def chip_hour(self, kind: SliceSpec, capacity: str, region: str | None = None) -> float:
        """Return the price of one chip of a slice, the lowest where no region is said; raises `PriceError`."""
        capacities = self.chips.get(kind.chip.name, {})
        if not capacities:
            raise PriceError(f"no price of {kind.chip.name} is known, of {', '.join(self.chips)} only; {_OWN}")
        regions = capacities.get(capacity, {})
        if not regions:
            known = ", ".join(capacities)
            raise PriceError(f"no {capacity} price of {kind.chip.name} is known, only {known}; {_OWN}")
        if region is not None and region not in regions:
            raise PriceError(f"no {capacity} price of {kind.chip.name} in {region} is known, only {', '.join(regions)}")
        return min(regions.values()) if region is None else regions[region]

    def of_stages(self, layout: Layout) -> dict[str, float]:
        """Return what a chip of each stage costs an hour, on demand or as it is sold, where that is known."""
        prices: dict[str, float] = {}
        for pool in layout.pools:
            sold = self.chips.get(pool.slice.chip.name, {})
            capacity = "on-demand" if "on-demand" in sold else next(iter(sold), None)
            if capacity is not None:
                prices |= dict.fromkeys(pool.stages, self.chip_hour(pool.slice, capacity))
        return prices

    def slice_hour(self, kind: SliceSpec, capacity: str, region: str | None = None) -> float:
        """Return the price of a whole slice an hour; raises as `chip_hour`."""
        return kind.chips * self.chip_hour(kind, capacity, region)


_FORM = "write date, and chips with dollars an hour: {v6e: {on-demand: {us-east5: 2.7}}}"
_OWN = "give your own with --prices (docs/performance.md)"
