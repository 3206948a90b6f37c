"""`wan-tpu hosts`: a layout on TPU VMs, without Kubernetes."""

import re
from collections.abc import Sequence
from pathlib import Path

from cluster.layout import Layout
from cluster.provision.tpu_vm import Machines, format_scripts
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import InvalidInput, OutputError


def hosts(argv: Sequence[str]) -> None:
    """Write the scripts that create a layout's machines and that each runs when it boots: a Ray cluster of TPU VMs."""
    parser = Parser(prog="wan-tpu hosts", description=hosts.__doc__)
    parser.add_argument("folder", type=Path, help="where the scripts are written")
    parser.add_argument("--layout", required=True, help="a layout file, or a shipped one by its name")
    parser.add_argument("--image", required=True, help="container of all machines: this package, with Python and Ray")
    parser.add_argument("--project", required=True, help="of Google Cloud")
    parser.add_argument("--zone", required=True, help="of Google Cloud that has such slices, such as us-east5-b")
    parser.add_argument("--name", default="wan", help="that machines' names begin with; default %(default)s")
    parser.add_argument(
        "--account", required=True, help="Google service account of the machines, for buckets and the cluster's token"
    )
    parser.add_argument("--spot", action="store_true", help="slices that Google may take away, for less")
    args = parser.parse_args(argv)
    for name in ("name", "project", "zone"):
        if re.fullmatch(r"[a-z][-a-z0-9]{0,40}", getattr(args, name)) is None:
            raise InvalidInput(f"--{name} {getattr(args, name)!r} isn't made of lower-case letters, digits and dashes")
    if re.fullmatch(r"[-\w./:@]+", args.image) is None:
        raise InvalidInput(f"--image {args.image!r} is no image's name; give REGISTRY/NAME:TAG")
    if re.fullmatch(r"[-\w.]+@[-\w.]+", args.account) is None:
        raise InvalidInput(
            f"--account {args.account!r} is no service account; give NAME@PROJECT.iam.gserviceaccount.com"
        )
    machines = Machines(args.name, args.project, args.zone, args.image, args.account, args.spot)
    scripts = format_scripts(Layout.load(args.layout), machines)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        for name, content in scripts.items():
            (args.folder / name).write_text(content)
            (args.folder / name).chmod(0o755)
    except OSError as error:
        raise OutputError(f"can't write to {args.folder} ({error.strerror})") from None
    print(f"{', '.join(scripts)} are in {args.folder}; {args.folder}/create.sh creates the machines")
