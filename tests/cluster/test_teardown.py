"""`terraform destroy` isn't refused for what the module and a service have left in each other."""

import re

from tests.cluster.test_terraform import FILES, resources_of

RESOURCES = {kind: content for text in FILES.values() for kind, _, content in resources_of(text)}


def test_what_can_not_be_deleted_by_itself_goes_with_what_holds_it():
    """Cloud SQL keeps its connection for four days, pods are connected to the database, and its user owns tables."""
    policies = {kind: content["deletion_policy"] for kind, content in RESOURCES.items() if "deletion_policy" in content}
    assert policies == {
        "google_service_networking_connection": "REMOVE_PEERING",
        "google_sql_database": "ABANDON",
        "google_sql_user": "ABANDON",
    }
    # The provider has had that policy since this version.
    assert re.search(r'version = "~> 8\.7"', FILES["versions.tf"])


def test_deletion_is_protected_by_one_variable_alone():
    protected = {kind for kind, content in RESOURCES.items() if "deletion_protection" in content}
    assert protected == {"google_container_cluster", "google_sql_database_instance"}
    assert all("var.deletion_protection" in RESOURCES[kind]["deletion_protection"] for kind in protected)
