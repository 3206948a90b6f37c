"""Show the licence of a model's weights the first time someone opens a model that isn't free for everybody."""

import contextlib
import sys

from wan_tpu.families import family_of_spec
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.folder import cache_folder


def show_licence(model: ModelSpec) -> None:
    """Print the licence of a model's family on stderr, once per machine: a file in the cache records that."""
    family = family_of_spec(model)
    if family is None or not family.licence:
        return
    marker = cache_folder() / "licences" / family.name
    if marker.exists():
        return
    print(f"licence: {family.title} is under the {family.licence}", file=sys.stderr)
    with contextlib.suppress(OSError):  # If it fails, the next command shows the licence again.
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
