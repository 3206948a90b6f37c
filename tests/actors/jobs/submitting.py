"""Jobs submitted and claimed by tests."""

from actors.jobs.tables import Job


def ask(store, owner="ann", name="", **options):
    return store.submit(Job(owner=owner, request={"prompt": name}, **options))[0]


def claim_all(work):
    """Return the names of all waiting jobs in the order in which they are claimed."""
    names = []
    while leased := work.claim("w"):
        names.append(leased.request["prompt"])
    return names
