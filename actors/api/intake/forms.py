"""Forms (multipart/form-data) read as JSON would say the same: names with brackets become objects and lists.

Clients write a list of objects in one of these ways, and all of them are read:

    loras=[{"name": "a", "scale": 0.5}]             JSON in a field: curl, vLLM-Omni
    loras[0][name]=a  loras[0][scale]=0.5           indices
    loras[][name]=a   loras[][scale]=0.5            OpenAI's clients
    sigmas[]=1        sigmas[]=0.5                  OpenAI's clients
    sigmas=1          sigmas=0.5                    a name again and again: requests, curl
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from actors.api.intake.json_text import loads
from wan_tpu.errors import InvalidRequest

LISTS = ("loras", "sigmas")  # Fields that are lists although they may have been sent once.
TEXTS = ("prompt", "negative_prompt")  # Fields in which any text means itself, "" and "null" too.
MAX_FIELDS = 40
_FIELD_BYTES = 200_000  # A prompt of 32,000 characters in UTF-8, and some more.
_ABSENT = ("", "null")  # What a browser sends for an empty field, and what OpenAI's Node client has people write.
_URLS = (b"https://", b"http://", b"data:")
_NAME = re.compile(r"([^\[\]]*)((?:\[[^\[\]]*\]){1,3})")

Value = str | bytes


def read_form(content_type: str, body: bytes, files: Sequence[str]) -> list[tuple[str, Value]]:
    """Return a form's fields in order: texts, and files as bytes; raises `InvalidRequest`.

    A file field that a browser's user left empty is left out. A part without a plain filename (urllib3 1.x writes
    `filename*` alone, which RFC 7578 forbids) is a file where it isn't text.

    Args:
        content_type: The header, which says what stands between the parts.
        body: The whole form.
        files: The fields that may be files, by their names without brackets.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import Field, File, FormParser, parse_options_header

    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    fields: list[tuple[str, Value]] = []
    ended: list[bool] = []

    def add(name: str, value: Value) -> None:
        if len(fields) == MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields, which is all that are taken")
        fields.append((name, value))

    def on_field(field: Field) -> None:
        name, value = _name(field.field_name), field.value or b""
        may_be_file = _path(name)[0] in files
        try:
            text = value.decode(errors="surrogatepass")  # Half of a pair is refused later, with the field's name.
        except UnicodeDecodeError:
            if may_be_file:
                add(name, value)
                return
            raise InvalidRequest(f"{name[:80]} isn't UTF-8; encode the form's texts as UTF-8", name) from None
        if len(value) > _FIELD_BYTES and not may_be_file:
            raise InvalidRequest(f"the field {name[:80]!r} has {len(value)} bytes; {_FIELD_BYTES} are taken", name)
        add(name, text)

    def on_file(file: File) -> None:
        name = _name(file.field_name)
        file.file_object.seek(0)
        content = file.file_object.read()
        if not content and not file.file_name:
            return
        if _path(name)[0] not in files:
            raise InvalidRequest(
                f"the field {name[:80]!r} is a file; only {' and '.join(files)} may be; send others without a filename",
                name,
            )
        is_url = content[:8].lower().startswith(_URLS)  # As LiteLLM sends one: in place of the file's content.
        add(name, content.decode(errors="replace") if is_url else content)

    try:
        parser = FormParser(
            "multipart/form-data",
            on_field,
            on_file,
            on_end=lambda: ended.append(True),
            boundary=options.get(b"boundary"),
            config={"MAX_MEMORY_FILE_SIZE": len(body)},  # Nothing is written to a disk.
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise _unreadable(str(error)[:120]) from None
    if not ended:
        raise _unreadable("it is cut off before its end")
    return fields


def nest(fields: Iterable[tuple[str, Value]]) -> dict[str, Any]:
    """Return a form's fields as the object that JSON would have; raises `InvalidRequest`.

    Empty fields are left out, and so are those that say "null". What begins with a brace or a bracket is JSON.
    """
    columns: dict[str, list[Any]] = {}
    for name, value in fields:
        columns.setdefault(name, [])
        if isinstance(value, str) and name not in TEXTS:
            if value in _ABSENT:
                continue
            value = loads(value, name[:80], name[:80]) if value[:1] in ("{", "[") else value
        columns[name].append(value)
    body: dict[str, Any] = {}
    for name, values in columns.items():
        path = _path(name)
        if len(path) > 1 and path[1] == "":
            _check_lengths(path[0], columns)
            for number, value in enumerate(values):
                _put(body, [path[0], str(number), *path[2:]], value)
        elif path[0] in LISTS and len(path) == 1 and values:
            _put(body, path, [inner for value in values for inner in (value if isinstance(value, list) else [value])])
        elif len(values) > 1:
            raise _twice(name)
        elif values:
            _put(body, path, values[0])
    return {name: _as_lists(value) for name, value in body.items()}


def _path(name: str) -> list[str]:
    """Return ["loras", "0", "name"] of "loras[0][name]"; any other name is one step."""
    parts = _NAME.fullmatch(name)
    return [name] if parts is None else [parts[1], *parts[2][1:-1].split("][")]


def _put(body: dict[str, Any], path: list[str], value: Any) -> None:
    *outer, last = path
    for step in outer:
        body = body.setdefault(step, {})
        if not isinstance(body, dict):
            raise _twice(path[0])
    if last in body:
        raise _twice(path[0])
    body[last] = value


def _check_lengths(outer: str, columns: dict[str, list[Any]]) -> None:
    """Raise `InvalidRequest` where it isn't certain which object of a list has a value that others lack.

    OpenAI's Python client sends all values of one key, then all of the next.
    """
    lengths = {
        path[2]: len(values)
        for name, values in columns.items()
        if (path := _path(name))[:2] == [outer, ""] and len(path) > 2
    }
    if len(set(lengths.values())) > 1:
        counted = ", ".join(f"{count} x {key}" for key, count in lengths.items())[:80]
        raise InvalidRequest(
            f"{outer}: a form says {counted}, and not which belong together; give every object the same keys, or send "
            f'the list as JSON, such as {outer}=[{{"name": "a", "scale": 0.5}}]',
            outer,
        )


def _as_lists(value: Any) -> Any:
    """Return objects whose keys are all numbers as lists."""
    if not isinstance(value, dict) or not value:
        return value
    inner = {key: _as_lists(item) for key, item in value.items()}
    if all(key.isascii() and key.isdigit() and len(key) < 5 for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


def _name(name: bytes | None) -> str:
    try:
        return (name or b"").decode()
    except UnicodeDecodeError:
        raise _unreadable("a field's name isn't UTF-8") from None


def _twice(name: str) -> InvalidRequest:
    return InvalidRequest(f"the field {name[:80]!r} was sent more than once; send it once", name.partition("[")[0][:80])


def _unreadable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the form can't be read ({reason}); send multipart/form-data")
