"""`wan-tpu weights`: write a checkpoint in the form that slices read fastest."""

import argparse
import os
from collections.abc import Sequence

from wan_tpu.commands.parser import Parser, add_precision
from wan_tpu.errors import InvalidInput


def weights(argv: Sequence[str]) -> None:
    """Write a checkpoint's weights as programs take them: smaller, and in pieces that follow a slice's shards."""
    parser = Parser(prog="wan-tpu weights", description=weights.__doc__)
    actions = parser.add_actions(
        dest="action", required=True, metavar="ACTION", parser_class=Parser, help="what to do; each has a --help"
    )
    action = actions.add_parser("convert", help="write a checkpoint, for --model, from another one")
    action.add_argument("source", help="name, hub id or diffusers directory; a converted one, too")
    action.add_argument(
        "destination", help="folder or gs://bucket/folder; complete components of the same files are kept"
    )
    action.add_argument(
        "--experts",
        nargs="+",
        metavar="FILE",
        help="other experts, from files of torch.save (TurboDiffusion's .pth), the high-noise expert first",
    )
    action.add_argument(
        "--kept_blocks",
        type=float,
        help="with sparse experts: the share of the blocks of keys that attention keeps; default 0.1",
    )
    add_precision(action, purpose="to write; commands that read it need the same --precision")
    _convert(parser.parse_args(argv))


def _convert(args: argparse.Namespace) -> None:
    from wan_tpu.families import family_of, open_checkpoint
    from wan_tpu.families.model import open_model
    from wan_tpu.licences import show_licence
    from wan_tpu.progress import Console
    from wan_tpu.runtime.converting import convert
    from wan_tpu.runtime.runtime import check_precision
    from wan_tpu.storage.opening import open_storage

    destination = open_storage(args.destination, private=False)
    checkpoint = open_checkpoint(args.source)
    if checkpoint.source in (destination.location(), os.path.realpath(args.destination)):
        raise InvalidInput(f"{args.destination} is the source itself; give another folder")
    if args.kept_blocks is not None and not args.experts:
        raise InvalidInput(
            "--kept_blocks has no effect without sparse --experts; a checkpoint with sparse experts has it in "
            "transformer/config.json"
        )
    if args.experts:
        family = family_of(checkpoint)
        if family.with_experts is None:
            raise InvalidInput(f"{family.title}'s experts can't be replaced; omit --experts")
        checkpoint = family.part(family.with_experts)(args.source, args.experts, args.kept_blocks)
    model = open_model(checkpoint)
    show_licence(model.spec)
    check_precision(model, args.dtype)
    existing = convert(checkpoint, model.components, args.dtype, destination, Console())
    for folder in existing:
        print(f"{folder} exists already")
    print(f"{destination.location()} is ready for --model")
