# Environment variables of the pods that are nobody's business, such as HF_TOKEN, a line each. Terraform creates the
# secret without a value, so that none is in its state: gcloud secrets versions add
resource "google_secret_manager_secret" "environment" {
  secret_id = "${var.name}-environment"
  replication {
    auto {}
  }
  depends_on = [google_project_service.used]
}
