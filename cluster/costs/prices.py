"""The hourly prices of chips: a dated table with its source, which a user can replace."""

import datetime
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cluster.errors import PriceError
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from cluster.yaml_values import parse_yaml, validate

_Dollars = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Prices:
    """Prices in US dollars per chip and hour."""

    date: datetime.date  # The day on which the prices were valid.
    # The prices, by generation, capacity ("on-demand", "spot") and region.
    chips: dict[str, dict[str, dict[str, _Dollars]]]

    @classmethod
    def load(cls, path: Path | None = None) -> "Prices":
        """Read a table of prices, by default the shipped one.

        Raises:
            PriceError: The table can't be read or used.
        """
        source = resources.files("cluster.costs") / "prices.yaml" if path is None else path
        try:
            return validate(cls, parse_yaml(source.read_text()), {cls: _FORM})
        except OSError as error:
            raise PriceError(f"{source} can't be read ({error.strerror})") from None
        except ValueError as error:
            raise PriceError(f"{source}: {error}") from None

    def chip_hour(self, kind: SliceSpec, capacity: str, region: str | None = None) -> float:
        """Return the hourly price of one chip of a slice, without a region the lowest.

        Raises:
            PriceError: The table has no such price.
        """
        capacities = self.chips.get(kind.chip.name, {})
        if not capacities:
            raise PriceError(f"there is no price for {kind.chip.name}, only for {', '.join(self.chips)}; {_REMEDY}")
        regions = capacities.get(capacity, {})
        if not regions:
            known = ", ".join(capacities)
            raise PriceError(f"there is no {capacity} price for {kind.chip.name}, only {known}; {_REMEDY}")
        if region is not None and region not in regions:
            raise PriceError(
                f"there is no {capacity} price for {kind.chip.name} in {region}, only in {', '.join(regions)}"
            )
        return min(regions.values()) if region is None else regions[region]

    def of_stages(self, layout: Layout) -> dict[str, float]:
        """Return each stage's hourly price per chip where it is known: on demand, or else the first capacity listed."""
        prices: dict[str, float] = {}
        for pool in layout.pools:
            offers = self.chips.get(pool.slice.chip.name, {})
            capacity = "on-demand" if "on-demand" in offers else next(iter(offers), None)
            if capacity is not None:
                prices |= dict.fromkeys(pool.stages, self.chip_hour(pool.slice, capacity))
        return prices

    def slice_hour(self, kind: SliceSpec, capacity: str, region: str | None = None) -> float:
        """Return the hourly price of a whole slice; raises `PriceError` as `chip_hour` does."""
        return kind.chips * self.chip_hour(kind, capacity, region)


_FORM = "write date, and chips with dollars an hour: {v6e: {on-demand: {us-east5: 2.7}}}"
_REMEDY = "give your own with --prices (docs/performance.md)"
