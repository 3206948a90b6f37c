# What machines may do: run pods, and pull the image.
resource "google_service_account" "nodes" {
  account_id   = "${var.name}-nodes"
  display_name = "Machines of the cluster ${var.name}"
  depends_on   = [google_project_service.used]
}

resource "google_project_iam_member" "nodes" {
  project = var.project
  role    = "roles/container.defaultNodeServiceAccount" # Logs and metrics.
  member  = google_service_account.nodes.member
}

resource "google_artifact_registry_repository_iam_member" "nodes" {
  repository = google_artifact_registry_repository.wan.name
  location   = var.region
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.nodes.member
}

# What pods may do: use the bucket and the database.
resource "google_service_account" "pods" {
  account_id   = "${var.name}-tpu"
  display_name = "Pods of wan-tpu"
  depends_on   = [google_project_service.used]
}

resource "google_service_account_iam_member" "pods" {
  service_account_id = google_service_account.pods.name
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${google_container_cluster.wan.workload_identity_config[0].workload_pool}[${var.pods.namespace}/${var.pods.account}]"
}

resource "google_storage_bucket_iam_member" "pods" {
  bucket = google_storage_bucket.wan.name
  role   = "roles/storage.objectUser"
  member = google_service_account.pods.member
}

resource "google_project_iam_member" "pods" {
  for_each = toset(["roles/cloudsql.client", "roles/cloudsql.instanceUser"])
  project  = var.project
  role     = each.key
  member   = google_service_account.pods.member
}
