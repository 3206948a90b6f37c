"""Which names can be used in storage."""

MAX_PART_BYTES = 200  # of a name between slashes: file systems allow 255, and the partial file's name is longer


def name_problem(name: str, *, hidden: bool = False) -> str | None:
    """Return why a name can't be used under a folder, or None when it can; hidden: parts may begin with a dot."""
    if not name:
        return "is empty"
    if name.startswith("/") or "\\" in name:
        return "is not a relative path with forward slashes"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}, and would leave its folder or change its meaning"
        if part.startswith(".") and not hidden:
            return f"has the part {part!r}, which would be hidden: begin it with another character than a dot"
        if len(part.encode(errors="replace")) > MAX_PART_BYTES:
            return f"has a part of more than {MAX_PART_BYTES} bytes"
    if any(not character.isprintable() for character in name):
        return "has a control character, or is no valid Unicode"
    return None
