"""Progress of stages as `HostProgress` values, for whoever leads the slice."""

from actors.host_values import HostProgress, Report


class Reported:
    """Passes the progress of stages on."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def tell(self, doing: str, done: int, total: int) -> None:
        """Tell what is at hand, the one after `done` of `total`."""
        self._report(HostProgress(doing, done, total))

    def bar(self, stage: str, total: int) -> "_ReportedBar":
        """Start a stage of `total` units."""
        return _ReportedBar(self._report, stage, total)


class _ReportedBar:
    def __init__(self, report: Report, doing: str, total: int) -> None:
        self._report, self._doing, self._total, self._done = report, doing, total, 0

    def step(self) -> None:
        self._done += 1
        self._report(HostProgress(self._doing, self._done, self._total))

    def close(self) -> None:
        pass
