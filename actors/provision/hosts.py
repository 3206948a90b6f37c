"""`wan-tpu hosts`: scripts that create the TPU VMs of a layout, without Kubernetes."""

from collections.abc import Sequence
from pathlib import Path

from actors.commands.arguments import LAYOUT_HELP
from actors.provision.names import check_account, check_image, check_name
from cluster.layout import Layout
from cluster.provision.tpu_vm import Machines, format_scripts
from wan_tpu.commands.parser import Parser
from wan_tpu.errors import OutputError


def hosts(argv: Sequence[str]) -> None:
    """Write scripts that create the TPU VMs of a layout, and start-up scripts that join them to a Ray cluster."""
    parser = Parser(prog="wan-tpu hosts", description=hosts.__doc__)
    parser.add_argument("folder", type=Path, help="folder for the scripts")
    parser.add_argument("--layout", required=True, help=LAYOUT_HELP)
    parser.add_argument(
        "--image", required=True, help="container image of all machines, with Python, Ray and this package"
    )
    parser.add_argument("--project", required=True, help="Google Cloud project")
    parser.add_argument("--zone", required=True, help="Google Cloud zone that has such slices, such as us-east5-b")
    parser.add_argument("--name", default="wan", help="first part of the machines' names; default %(default)s")
    parser.add_argument(
        "--account",
        required=True,
        help="Google service account of the machines, which reads buckets and the cluster's token",
    )
    parser.add_argument("--spot", action="store_true", help="use spot slices: cheaper, but Google may take them away")
    args = parser.parse_args(argv)
    check_name("--name", args.name, "wan")
    check_name("--project", args.project, "my-project")
    check_name("--zone", args.zone, "us-east5-b")
    check_image(args.image)
    check_account(args.account)
    machines = Machines(args.name, args.project, args.zone, args.image, args.account, args.spot)
    scripts = format_scripts(Layout.load(args.layout), machines)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        for name, content in scripts.items():
            (args.folder / name).write_text(content)
            (args.folder / name).chmod(0o755)
    except OSError as error:
        raise OutputError(f"can't write to {args.folder} ({error.strerror}); choose another folder") from None
    print(f"wrote {', '.join(scripts)} to {args.folder}; {args.folder}/create.sh creates the machines")
