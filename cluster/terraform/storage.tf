# Weights, requests, snapshots and results.
resource "google_storage_bucket" "wan" {
  name                        = var.project
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
}

# The container image.
resource "google_artifact_registry_repository" "wan" {
  repository_id = var.name
  location      = var.region
  format        = "DOCKER"
  depends_on    = [google_project_service.used]
}
