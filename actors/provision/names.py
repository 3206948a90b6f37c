"""Checks of names that end up in Kubernetes objects and shell scripts, where a wrong one would fail much later."""

import re

from wan_tpu.errors import InvalidInput

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"


def check_name(flag: str, name: str, example: str) -> None:
    """Raise `InvalidInput` unless a name may begin the names of Kubernetes objects and of Google Cloud's machines."""
    # Names may have 63 characters, of which suffixes need some.
    if len(name) > 40 or re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) is None:
        raise InvalidInput(
            f"{flag} is {name!r}; give up to 40 lower-case letters, digits and dashes, with a letter first and no dash "
            f"last, such as {example}"
        )


def check_label(flag: str, label: str, example: str) -> None:
    """Raise `InvalidInput` unless a name, such as that of a namespace, is an RFC 1123 label."""
    if len(label) > 63 or re.fullmatch(_LABEL, label) is None:
        raise InvalidInput(
            f"{flag} is {label!r}; give up to 63 lower-case letters, digits and dashes, with no dash first or last, "
            f"such as {example}"
        )


def check_image(image: str) -> None:
    """Raise `InvalidInput` unless --image has the form of a container image's name."""
    if re.fullmatch(r"[-\w./:@]+", image) is None:
        raise InvalidInput(f"--image {image!r} isn't the name of an image; give REGISTRY/NAME:TAG")


def check_account(account: str) -> None:
    """Raise `InvalidInput` unless --account has the form of a Google service account."""
    if re.fullmatch(r"[-\w.]+@[-\w.]+", account) is None:
        raise InvalidInput(
            f"--account {account!r} isn't a Google service account; give NAME@PROJECT.iam.gserviceaccount.com"
        )


def check_hostname(hostname: str) -> None:
    """Raise `InvalidInput` unless --hostname is a DNS name with at least two parts, or a wildcard for such names."""
    if re.fullmatch(rf"(\*\.)?({_LABEL}\.)+{_LABEL}", hostname) is None:
        raise InvalidInput(f"--hostname {hostname!r} isn't a host name; give one such as videos.example.com")
