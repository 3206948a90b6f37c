"""API keys are made, stored as hashes, compared and revoked, on both databases."""

import math
import threading

import pytest
from sqlalchemy import select

from actors.cli import main
from actors.jobs.keys import KeyLimits, list_keys, make_key, match_key, revoke_key
from actors.jobs.tables import ApiKey
from wan_tpu.errors import InvalidInput


def in_force(database):
    return {key.id: key for key in list_keys(database)}


def test_a_key_matches_and_its_secret_is_stored_nowhere(database):
    text = make_key(database, "ann", KeyLimits(requests_per_minute=30))
    key = match_key(in_force(database), text)
    assert (key.name, key.requests_per_minute, key.revoked_at) == ("ann", 30, None)
    secret = text.rpartition("_")[2]
    assert len(secret) == 64
    with database.read() as session:
        assert secret not in str(session.scalars(select(ApiKey)).all())


def test_text_that_is_no_key_doesn_t_match(database):
    text = make_key(database, "ann")
    keys = in_force(database)
    (key,) = keys.values()
    other = text[:-1] + ("0" if text[-1] != "0" else "1")
    stolen = f"wan_{key.id}_{key.secret_hash}"
    for credential in ("", "é" * 9, other, text.replace(key.id, "0" * 16), stolen, f"{text}0", f"{text}\n"):
        assert match_key(keys, credential) is None


def test_a_revoked_key_stays_as_a_row_and_its_name_is_free(database):
    text = make_key(database, "ann")
    with pytest.raises(match="'ann'"):
        make_key(database, "ann")
    revoke_key(database, "ann")
    assert match_key(in_force(database), text) is None
    with pytest.raises(match="none"):
        revoke_key(database, "ann")
    renewed = make_key(database, "ann")
    again = match_key(in_force(database), renewed)
    assert len(list_keys(database)) == 2
    revoke_key(database, again.id)
    assert all(key.revoked_at is not None for key in list_keys(database))


def test_of_keys_of_one_name_made_at_once_one_is_there(database):
    def make():
        try:
            keys.append(make_key(database, "ann"))
        except InvalidInput as error:
            refused.append(error)

    keys, refused = [], []
    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(keys), len(refused), len(list_keys(database))) == (1, 5, 1)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("", {}),
        ("x" * 65, {}),
        ("ann", {"requests_per_minute": 0.0}),
        ("ann", {"scopes": ("make", "fly")}),
        ("ann", {"priority": 101}),
        ("ann", {"days": math.nan}),
    ],
)
def test_impossible_key_is_refused(name, limits):
    with pytest.raises(InvalidInput):
        make_key(None, name, KeyLimits(**limits))  # It raises before it uses the database.


def test_keys_are_added_limited_listed_and_revoked_by_the_command(tmp_path, capsys):
    options = ["--database", str(tmp_path / "jobs.sqlite")]
    assert main(["keys", "add", "ann", "--per_minute", "30", *options]) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("wan_")
    assert main(["keys", "add", "ann", *options]) == 2
    assert "revoke it first" in capsys.readouterr().err
    assert main(["keys", "list", *options]) == 0
    table = capsys.readouterr().out
    assert "30 a minute" in table and text.split("_")[1] in table
    assert text.rpartition("_")[2] not in table
    assert main(["keys", "limit", "ann", "--running", "2", "--per_minute", "none", "--days", "3", *options]) == 0
    assert main(["keys", "limit", "ann", "--scopes", "read,operate", *options]) == 0
    assert main(["keys", "limit", "ann", "--running", "0", *options]) == 2
    assert main(["keys", "limit", "ann", *options]) == 2
    assert "limit" in capsys.readouterr().err
    assert main(["keys", "list", *options]) == 0
    table = capsys.readouterr().out
    assert "2 running, until 20" in table and "read,operate" in table and "a minute" not in table
    assert main(["keys", "revoke", "ann", *options]) == 0
    assert main(["keys", "list", *options]) == 0
    assert main(["keys", "revoke", "ann", *options]) == 2
    output = capsys.readouterr()
    assert "the keys are: none" in output.err and output.out == "revoked ann\n"
    assert "has no valid key" in output.err and "keys add NAME --database" in output.err


def test_looking_for_keys_makes_no_database(tmp_path, capsys):
    database = tmp_path / "jobs.sqlite"
    for action, code in ((["list"], 0), (["usage"], 0), (["revoke", "ann"], 2), (["limit", "ann", "--days", "3"], 2)):
        assert main(["keys", *action, "--database", str(database)]) == code
        output = capsys.readouterr()
        assert output.out == "" and str(database) in output.err
    assert not database.exists()
