# What the Gateway of wan-tpu manifests --hostname refers to: --address_name, --certificate_map and --ssl_policy.
locals {
  hostnames = var.hostname == null ? [] : [var.hostname]
}

resource "google_compute_global_address" "service" {
  count      = length(local.hostnames)
  name       = var.name
  depends_on = [google_project_service.used]
}

# Google's default also lets TLS 1.0 in.
resource "google_compute_ssl_policy" "service" {
  count           = length(local.hostnames)
  name            = var.name
  profile         = "MODERN"
  min_tls_version = "TLS_1_2"
  depends_on      = [google_project_service.used]
}

resource "google_certificate_manager_dns_authorization" "service" {
  count      = length(local.hostnames)
  name       = var.name
  domain     = local.hostnames[count.index]
  depends_on = [google_project_service.used]
}

resource "google_certificate_manager_certificate" "service" {
  count = length(local.hostnames)
  name  = var.name
  managed {
    domains            = local.hostnames
    dns_authorizations = google_certificate_manager_dns_authorization.service[*].id
  }
}

resource "google_certificate_manager_certificate_map" "service" {
  count      = length(local.hostnames)
  name       = var.name
  depends_on = [google_project_service.used]
}

resource "google_certificate_manager_certificate_map_entry" "service" {
  count        = length(local.hostnames)
  name         = var.name
  map          = google_certificate_manager_certificate_map.service[0].name
  certificates = google_certificate_manager_certificate.service[*].id
  hostname     = local.hostnames[count.index]
}
