# The service's jobs. Pods log in with their Google service account through Cloud SQL's proxy: there is no password.
resource "google_sql_database_instance" "wan" {
  name                = var.name
  region              = var.region
  database_version    = "POSTGRES_17"
  deletion_protection = var.deletion_protection

  settings {
    edition           = "ENTERPRISE"
    tier              = "db-custom-2-8192"
    availability_type = var.database_availability
    disk_autoresize   = true
    backup_configuration {
      enabled                        = true
      point_in_time_recovery_enabled = true
    }
    ip_configuration {
      ipv4_enabled    = false
      private_network = google_compute_network.wan.id
      ssl_mode        = "ENCRYPTED_ONLY"
    }
    database_flags {
      name  = "cloudsql.iam_authentication"
      value = "on"
    }
  }
  depends_on = [google_service_networking_connection.google_services]
}

resource "google_sql_database" "jobs" {
  name     = "jobs"
  instance = google_sql_database_instance.wan.name
  # The instance takes it along. By itself it can't be deleted while pods are connected.
  deletion_policy = "ABANDON"
}

resource "google_sql_user" "pods" {
  instance       = google_sql_database_instance.wan.name
  name           = trimsuffix(google_service_account.pods.email, ".gserviceaccount.com")
  type           = "CLOUD_IAM_SERVICE_ACCOUNT"
  database_roles = ["cloudsqlsuperuser"] # Creates the tables, and migrates them.
  # The instance takes it along. By itself it can't be deleted, because it owns the tables.
  deletion_policy = "ABANDON"
}
