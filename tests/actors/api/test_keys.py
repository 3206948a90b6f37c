"""API keys: made, kept as hashes, compared, limited, revoked while in use."""

import json
import stat
import threading
import time

import pytest

from actors.api.access import Access, TooMany, UnknownKey
from actors.api.keys import KeysError, add_key, list_keys, revoke_key
from actors.cli import main


@pytest.fixture
def file(tmp_path):
    return tmp_path / "config" / "keys.json"


def bearer(text):
    return f"Bearer {text}"


def test_a_key_opens_and_its_secret_is_kept_nowhere(file):
    text, made = add_key(file, "ann")
    assert Access(file).admit(bearer(text)) == made
    secret = text.rpartition("_")[2]
    assert len(secret) == 64
    for kept in file.parent.iterdir():
        assert secret not in kept.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_no_key_doesn_t_open(file):
    text, made = add_key(file, "ann")
    access = Access(file)
    other = text[:-1] + ("0" if text[-1] != "0" else "1")
    unknown = text.replace(made.id, "0" * 16)
    for header in (
        None,
        "",
        "Bearer",
        "Bearer ",
        text,
        f"Basic {text}",
        bearer(other),
        bearer(unknown),
        bearer("é" * 9),
    ):
        with pytest.raises(UnknownKey, match="Authorization: Bearer"):
            access.admit(header)
    assert access.admit(f"bearer  {text} ") == made  # the scheme's case doesn't matter (RFC 9110)


def test_a_stolen_hash_doesn_t_open(file):
    _, made = add_key(file, "ann")
    with pytest.raises(UnknownKey):
        Access(file).admit(bearer(f"wan_{made.id}_{made.secret_hash}"))


def test_a_running_service_learns_of_new_and_revoked_keys(file):
    text, _ = add_key(file, "ann")
    access = Access(file)
    later, _ = add_key(file, "bob")
    revoke_key(file, "ann")
    give_up = time.monotonic() + 30
    while True:
        try:
            access.admit(bearer(text))
        except UnknownKey:
            break
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert access.admit(bearer(later)).name == "bob"
    revoke_key(file, "bob")
    assert list_keys(file) == []


def test_a_file_that_is_broken_while_in_use_keeps_the_keys_in_force(file):
    text, _ = add_key(file, "ann")
    access = Access(file)
    file.write_text("{")
    time.sleep(1.1)
    assert access.admit(bearer(text))
    with pytest.raises(KeysError, match="wan-tpu keys add"):
        Access(file)


def test_keys_of_the_environment(file, monkeypatch):
    text, made = add_key(file, "ann")
    monkeypatch.setenv("WAN_TPU_API_KEYS", file.read_text())
    file.unlink()
    assert Access().admit(bearer(text)) == made
    assert Access(file).keys == 1
    for broken in ("x", "[]", '{"keys": [{}]}', '{"keys": 1}'):
        with pytest.raises(KeysError, match="WAN_TPU_API_KEYS"):
            Access(environment=broken)


def test_a_key_has_a_rate(file):
    text, _ = add_key(file, "ann", requests_per_minute=1.2)  # one in 50 s
    often, _ = add_key(file, "cid", requests_per_minute=60_000)
    free, _ = add_key(file, "bob")
    access = Access(file)
    access.admit(bearer(text))
    with pytest.raises(TooMany, match=r"1\.2 requests a minute") as refused:
        access.admit(bearer(text))
    assert 0 < refused.value.retry_after_s <= 50
    for _ in range(100):
        access.admit(bearer(free))
        access.admit(bearer(often))  # up to 10 s of its rate at once


def test_keys_added_at_once_are_all_there(file):
    threads = [threading.Thread(target=add_key, args=(file, f"n{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(key.name for key in list_keys(file)) == [f"n{number}" for number in range(8)]


@pytest.mark.parametrize(("name", "rate"), [("", None), ("a\nb", None), ("x" * 65, None), ("ann", 0.0), ("ann", -1.0)])
def test_what_can_t_be_a_key_is_refused(file, name, rate):
    with pytest.raises(KeysError, match=r"allowed|give"):
        add_key(file, name, rate)
    assert list_keys(file) == []


def test_the_command(file, capsys):
    options = ["--file", str(file)]
    assert main(["keys", "add", "ann", "--per_minute", "30", *options]) == 0
    text = capsys.readouterr().out.strip()
    assert Access(file).admit(bearer(text)).requests_per_minute == 30
    assert main(["keys", "add", "ann", *options]) == 2
    assert "revoke it first" in capsys.readouterr().err
    assert main(["keys", "list", *options]) == 0
    listed = capsys.readouterr().out
    assert "30 a minute" in listed
    assert json.loads(file.read_text())["keys"][0]["id"] in listed
    assert text.rpartition("_")[2] not in listed
    assert main(["keys", "revoke", "ann", *options]) == 0
    assert main(["keys", "revoke", "ann", *options]) == 2
    assert "there are: none" in capsys.readouterr().err
