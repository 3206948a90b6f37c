"""Read forms, with files or URL-encoded, as the equivalent JSON: names with brackets become objects and lists.

Clients write lists in these ways, all of which are supported:

    loras=[{"name": "a", "scale": 0.5}]             JSON in a field: curl, vLLM-Omni
    loras[0][name]=a  loras[0][scale]=0.5           indices
    loras[][name]=a   loras[][scale]=0.5            OpenAI's clients
    sigmas[]=1        sigmas[]=0.5                  OpenAI's clients
    sigmas=1          sigmas=0.5                    repeated names: requests, curl
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import parse_qsl

from actors.api.untrusted.json_text import loads
from actors.api.untrusted.references import REFERENCE_LISTS
from wan_tpu.errors import InvalidRequest

LISTS_OF_TEXTS = ("next_prompts",)
LISTS = (
    "loras",
    "sigmas",
    "input_references",
    *LISTS_OF_TEXTS,
)  # Fields that are lists even if they were sent only once.
TEXTS = ("prompt", "negative_prompt")  # Fields whose text is taken literally, even "" and "null".
MAX_FIELDS = 70  # A form may send each of 29 `next_prompts` as a field of its own.
_FIELD_BYTES = 200_000  # Enough for a prompt of 32,000 characters in UTF-8.
_ABSENT = ("", "null")  # Browsers send "" for an empty field, and users of OpenAI's Node client write "null".
_URLS = (b"https://", b"http://", b"data:")
_NAME = re.compile(r"([^\[\]]*)((?:\[[^\[\]]*\]){1,3})")

Value = str | bytes


def read_form(content_type: str, body: bytes, files: Sequence[str]) -> list[tuple[str, Value]]:
    """Return a form's fields in order, texts as strings and files as bytes.

    File fields that a browser's user left empty are omitted. A part without a plain filename (urllib3 1.x writes only
    `filename*`, which RFC 7578 forbids) is a file if it isn't text.

    Args:
        content_type: The header, which names the boundary between the parts.
        files: The fields that may be files, by their names without brackets.

    Raises:
        InvalidRequest: The form can't be read.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import Field, File, FormParser, parse_options_header

    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    fields: list[tuple[str, Value]] = []
    ends: list[bool] = []

    def add(name: str, value: Value) -> None:
        if len(fields) == MAX_FIELDS:
            raise _build_too_many_error()
        fields.append((name, value))

    def on_field(field: Field) -> None:
        name = _decode_name(field.field_name)
        add(name, _decode_value(name, field.value or b"", files))

    def on_file(file: File) -> None:
        name = _decode_name(file.field_name)
        file.file_object.seek(0)
        content = file.file_object.read()
        if not content and not file.file_name:
            return
        if _split_name(name)[0] not in files:
            raise InvalidRequest(
                f"the field {name[:80]!r} is a file, but only {', '.join(files)} may be files; send it as one of "
                "these, or without a filename",
                name,
            )
        is_url = content[:8].lower().startswith(_URLS)  # LiteLLM sends a URL as a file's content.
        add(name, content.decode(errors="replace") if is_url else content)

    try:
        parser = FormParser(
            "multipart/form-data",
            on_field,
            on_file,
            on_end=lambda: ends.append(True),
            boundary=options.get(b"boundary"),
            config={"MAX_MEMORY_FILE_SIZE": len(body)},  # Nothing is written to a disk.
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise _build_unreadable_error(str(error)[:120]) from None
    if not ends:
        raise _build_unreadable_error("it is cut off before its end")
    return fields


def read_urlencoded(body: bytes, files: Sequence[str]) -> list[tuple[str, Value]]:
    """Return the fields of a form without files (application/x-www-form-urlencoded), as `read_form` does."""
    if body.lstrip()[:1] == b"{":
        raise InvalidRequest(
            "the body is JSON, but its Content-Type says that it is a form; send Content-Type: application/json, as "
            "curl does with --json"
        )
    try:
        pairs = parse_qsl(body, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise _build_too_many_error() from None
    named = [(_decode_name(name), value) for name, value in pairs]
    return [(name, _decode_value(name, value, files)) for name, value in named]


def nest(fields: Iterable[tuple[str, Value]]) -> dict[str, Any]:
    """Return a form's fields as the equivalent JSON object; raises `InvalidRequest`.

    Fields that are empty or "null" are omitted. A value that begins with a brace or a bracket is parsed as JSON. In a
    list of texts it stays a text if it isn't JSON.
    """
    columns: dict[str, list[Any]] = {}
    for name, value in fields:
        columns.setdefault(name, [])
        if isinstance(value, str) and name not in TEXTS:
            if value in _ABSENT:
                continue
            value = _parse(name, value)
        columns[name].append(value)
    body: dict[str, Any] = {}
    for name, values in columns.items():
        path = _split_name(name)
        if len(path) > 1 and path[1] == "":
            _check_lengths(path[0], columns)
            for number, value in enumerate(values):
                _put(body, [path[0], str(number), *path[2:]], value)
        elif path[0] in (*LISTS, *REFERENCE_LISTS) and len(path) == 1 and values:
            _put(body, path, [inner for value in values for inner in (value if isinstance(value, list) else [value])])
        elif len(values) > 1:
            raise _build_repeated_error(name)
        elif values:
            _put(body, path, values[0])
    return {name: _collect_lists(value) for name, value in body.items()}


def _parse(name: str, value: str) -> Any:
    """Return a field's value, parsed if it is JSON; raises `InvalidRequest`."""
    if value[:1] not in ("{", "["):
        return value
    try:
        parsed = loads(value, name[:80], name[:80])
    except InvalidRequest:
        if _split_name(name)[0] in LISTS_OF_TEXTS:  # "[Close-up] a cat" is a text.
            return value
        raise
    return parsed


def _split_name(name: str) -> list[str]:
    """Return ["loras", "0", "name"] for "loras[0][name]". Any other name is a single step."""
    parts = _NAME.fullmatch(name)
    return [name] if parts is None else [parts[1], *parts[2][1:-1].split("][")]


def _put(body: dict[str, Any], path: list[str], value: Any) -> None:
    *outer, last = path
    for step in outer:
        body = body.setdefault(step, {})
        if not isinstance(body, dict):
            raise _build_repeated_error(path[0])
    if last in body:
        raise _build_repeated_error(path[0])
    body[last] = value


def _check_lengths(outer: str, columns: dict[str, list[Any]]) -> None:
    """Raise `InvalidRequest` if the objects of a list may have different keys, since values can't be matched up then.

    OpenAI's Python client sends all values of one key, then all of the next.
    """
    lengths = {
        path[2]: len(values)
        for name, values in columns.items()
        if (path := _split_name(name))[:2] == [outer, ""] and len(path) > 2
    }
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} x {key}" for key, count in lengths.items())[:80]
        raise InvalidRequest(
            f"{outer}: a form with {counts} doesn't say which belong together; give every object the same keys, or "
            f'send the list as JSON, such as {outer}=[{{"name": "a", "scale": 0.5}}]',
            outer,
        )


def _collect_lists(value: Any) -> Any:
    """Return a value in which objects whose keys are all numbers have become lists."""
    if not isinstance(value, dict) or not value:
        return value
    inner = {key: _collect_lists(item) for key, item in value.items()}
    if all(key.isascii() and key.isdigit() and len(key) < 5 for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


def _decode_value(name: str, value: bytes, files: Sequence[str]) -> Value:
    """Return a field's text, or its bytes if it may be a file and isn't text; raises `InvalidRequest`."""
    may_be_file = _split_name(name)[0] in files
    try:
        text = value.decode(errors="surrogatepass")  # A lone surrogate is rejected later, with the field's name.
    except UnicodeDecodeError:
        if may_be_file:
            return value
        raise InvalidRequest(f"{name[:80]} isn't UTF-8; encode the form's texts as UTF-8", name) from None
    if len(value) > _FIELD_BYTES and not may_be_file:
        raise InvalidRequest(
            f"the field {name[:80]!r} has {len(value)} bytes; at most {_FIELD_BYTES} are accepted", name
        )
    return text


def _decode_name(name: bytes | None) -> str:
    try:
        return (name or b"").decode()
    except UnicodeDecodeError:
        raise _build_unreadable_error("a field's name isn't UTF-8") from None


def _build_too_many_error() -> InvalidRequest:
    return InvalidRequest(f"the form has more than {MAX_FIELDS} fields, the most that are accepted; send fewer")


def _build_repeated_error(name: str) -> InvalidRequest:
    return InvalidRequest(f"the field {name[:80]!r} was sent more than once; send it once", name.partition("[")[0][:80])


def _build_unreadable_error(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the form can't be read ({reason}); send multipart/form-data")
