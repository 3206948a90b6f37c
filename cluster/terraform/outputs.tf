output "image" {
  description = "Name of the container image, to which a tag is added."
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.wan.repository_id}/wan-tpu"
}

output "bucket" {
  description = "Where weights, requests and results go."
  value       = google_storage_bucket.wan.url
}

output "account" {
  description = "--account of wan-tpu manifests."
  value       = google_service_account.pods.email
}

output "cloud_sql" {
  description = "--cloud_sql of wan-tpu manifests."
  value       = google_sql_database_instance.wan.connection_name
}

output "address" {
  description = "Address of the load balancer, for an A record of the hostname."
  value       = google_compute_global_address.service[*].address
}

output "certificate_record" {
  description = "DNS record that shows that the hostname is yours."
  value       = google_certificate_manager_dns_authorization.service[*].dns_resource_record
}
